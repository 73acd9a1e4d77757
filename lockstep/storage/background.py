"""Work that goes on beside training: copies of tensors as they are now, and a thread that does one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Copies:
    """Copies of tensors in memory of the host that is kept from one time to the next, so that copying is all it costs.

    (The first time, the memory's first touch takes some twenty times as long.)

    From a GPU they come while it goes on computing, in the order of its work: what changes the tensors after `take`
    changes no copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors as they are now; call `wait` before they are read. Writes over those taken before."""
        copies = {}
        self._arrived = None
        for name, tensor in tensors.items():
            copies[name] = self._buffer(name, tensor)
            copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda and self._arrived is None:
                self._arrived = torch.cuda.Event()
        if self._arrived is not None:
            self._arrived.record()
        return copies

    def wait(self) -> None:
        """Wait until the copies are there."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        found = self._buffers.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            # In the tensor's own layout: it is copied in one piece, and laid out anew beside training.
            found = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda)
            self._buffers[name] = found
        return found


class Background:
    """Does one thing after the other in a thread. What goes wrong there is raised here, at the next call.

    Attributes:
        num_bytes: What the work says of how far it is; for whoever waits.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.num_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether there is work that is not done."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], object]) -> None:
        """Let it do something, after what it was given before; not at all if that went wrong."""
        self.check()
        self._thread = threading.Thread(target=self._run, args=(work, self._thread), name="background")
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong, if anything did; once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, beat: Callable[[], object] = lambda: None) -> None:
        """Wait until all is done, and raise what went wrong.

        Args:
            beat: Called now and then while the work gets on.
        """
        self.join(beat)
        self.check()

    def join(self, beat: Callable[[], object] = lambda: None) -> None:
        """Wait until all is done, well or not."""
        seen = -1
        while self._thread is not None and self._thread.is_alive():
            if self.num_bytes != seen:
                seen = self.num_bytes
                beat()
            self._thread.join(0.2)
        self._thread = None

    def moved(self, num_bytes: int) -> None:
        """For the work to say that it gets on."""
        self.num_bytes += num_bytes

    def _run(self, work: Callable[[], object], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if self._error is None:
            try:
                work()
            except BaseException as error:
                self._error = error
