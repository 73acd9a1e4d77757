"""Records what the main thread is doing: a heartbeat for the hang detector and a timer of each step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

READING = "reading samples"
COMPUTING = "forward and backward"
REDUCING = "reducing gradients"
UPDATING = "updating"


class Activity:
    """Current activity of the main thread; other threads may read it without a lock."""

    def __init__(self) -> None:
        #: Its name, and whether it waits for other ranks.
        self.doing, self.waits = "starting", False
        self.step: int | None = None  #: The optimizer step, from 0; None outside of steps.
        self.is_paused = (
            False  #: Whether no timeout applies, such as between the epochs of a script.
        )
        self.num_beats = (
            0  #: Number of activities entered so far. A rank makes progress if this grows.
        )
        self.work_s = 0.0  #: Seconds of own work in steps: reading, forward, backward, without waits for other ranks.
        self.num_steps, self.num_micro_batches = 0, 0  #: Those that `work_s` covers.
        self.wait_s = (
            0.0  #: Seconds of waiting in steps so far: for other ranks and for the network.
        )
        self._step_began = 0.0
        self._waited_s = 0.0
        self._work_before = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def enter(self, doing: str, *, waits: bool = False) -> None:
        """Enter an activity of this name, and note whether it waits for other ranks."""
        self.doing = doing
        self.waits = waits
        self.num_beats += 1

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Mark a wait for other ranks inside another activity; its time does not count as work."""
        before = self.doing, self.waits
        self.enter(doing, waits=True)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began
            self.enter(before[0], waits=before[1])

    def begin_step(self, step: int, device: torch.device) -> None:
        """Start a step, counted from 0, and with it this rank's own work; CUDA events time it on a GPU."""
        self.step = step
        self._step_began = time.perf_counter()
        self._waited_s = 0.0
        self._work_before = self.work_s
        if device.type == "cuda":
            # The host only enqueues kernels, so their duration has to be measured on the device.
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            self._events[0].record()

    def end_work(self, num_micro_batches: int) -> None:
        """End this rank's own work of a step, computed or enqueued on the device; the reduction over ranks follows."""
        self.enter(REDUCING, waits=True)
        if self._events is None:
            self.work_s += time.perf_counter() - self._step_began - self._waited_s
        else:
            self._events[1].record()
        self.num_micro_batches += num_micro_batches
        self.num_steps += 1

    def end_wait(self) -> None:
        """End the wait for other ranks. The device must have finished all work enqueued before."""
        if self._events is not None:
            self.work_s += self._events[0].elapsed_time(self._events[1]) / 1000
            self._events = None
        self.wait_s += time.perf_counter() - self._step_began - (self.work_s - self._work_before)
        self.enter(UPDATING)
