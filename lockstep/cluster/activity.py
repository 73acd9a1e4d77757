"""What this process is at: a sign of life that costs next to nothing, for whoever watches over the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

READING, COMPUTING, ADDING, UPDATING = "reading samples", "forward and backward", "adding up gradients", "updating"


class Activity:
    """The main thread says what it begins; any other thread may look.

    Attributes:
        doing: What it is at.
        waits: Whether that is waiting for other ranks.
        step: The optimizer step, from 0; None outside of steps.
        num_beats: Grows with everything it begins: who makes progress beats.
        work_s: Seconds of its own work in steps so far: reading, forward, backward; without waiting for others.
        wait_s: Seconds of waiting in steps so far: for the others, and for the sum to travel.
        num_steps: Steps that this work was for.
        num_micro_batches: Micro-batches that this work was for.
    """

    def __init__(self) -> None:
        self.doing, self.waits = "starting", False
        self.step: int | None = None
        self.num_beats = 0
        self.work_s, self.wait_s, self.num_steps, self.num_micro_batches = 0.0, 0.0, 0, 0
        self._step_began, self._waited_s, self._work_before = 0.0, 0.0, 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def enter(self, doing: str, *, waits: bool = False) -> None:
        """Something begins."""
        self.doing, self.waits = doing, waits
        self.num_beats += 1

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Around a wait for other ranks inside of something else."""
        before = self.doing, self.waits
        self.enter(doing, waits=True)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began
            self.enter(before[0], waits=before[1])

    def begin_step(self, step: int, device: torch.device) -> None:
        """A step begins: what follows is this rank's own work."""
        self.step = step
        self._step_began, self._waited_s, self._work_before = time.perf_counter(), 0.0, self.work_s
        if device.type == "cuda":
            # The host only orders the work; how long it takes, the device has to say.
            self._events = (_event(), _event())
            self._events[0].record()

    def end_work(self, num_micro_batches: int) -> None:
        """This rank's own work of a step is done, or ordered from its device; now it needs the others."""
        self.enter(ADDING, waits=True)
        if self._events is None:
            self.work_s += time.perf_counter() - self._step_began - self._waited_s
        else:
            self._events[1].record()
        self.num_micro_batches += num_micro_batches
        self.num_steps += 1

    def end_wait(self) -> None:
        """The others have come, and the device has done all that was ordered before."""
        if self._events is not None:
            self.work_s += self._events[0].elapsed_time(self._events[1]) / 1000
            self._events = None
        self.wait_s += time.perf_counter() - self._step_began - (self.work_s - self._work_before)
        self.enter(UPDATING)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)
