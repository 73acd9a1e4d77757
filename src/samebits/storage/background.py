"""Work in the background of training: snapshots of tensors in host memory, and a thread that runs one task at a time.

training thread    step 10 | take() | step 11 | step 12 | step 13 ...
GPU stream                 |- copy to host -|
background thread          | wait() ........|- hash, write, fsync -|
"""

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class HostCopies:
    """Snapshots of tensors in reused host memory.

    Reuse matters: the first write to fresh memory faults in every page and takes about twenty times as long as a copy.

    Copies from a GPU are asynchronous and follow the order of its stream. Later changes to the tensors therefore do not
    reach the copies, although `take` returns before the data has arrived.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Snapshot tensors of any shape and device into reused copies on the host. Call `wait` before reading them."""
        copies = {}
        self._arrived = None
        for name, tensor in tensors.items():
            found = self._buffers.get(name)
            if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                # Keep the tensor's strides: the copy is then one memcpy. The background thread makes it contiguous.
                found = torch.empty_like(
                    tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda
                )
            copies[name] = self._buffers[name] = found
            # Detached: otherwise autograd would record the copy of a parameter, and keep its graph until the next save.
            copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda and self._arrived is None:
                self._arrived = torch.cuda.Event()
        # One event behind the last copy is enough, since a stream works in order.
        if self._arrived is not None:
            self._arrived.record()
        return copies

    def wait(self) -> None:
        """Wait until the copies have arrived on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()


class Background:
    """A thread that runs one task after the other. The error of a task is raised at the caller's next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        #: Progress of the tasks so far, in bytes. `join` reads it to see that a task still progresses.
        self.num_bytes = 0

    @property
    def is_busy(self) -> bool:
        """Whether a task is running or waiting."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], object]) -> None:
        """Run a task after all earlier ones.

        The task is skipped if an earlier one failed: a later checkpoint must not hide that an earlier one is missing.

        Raises:
            BaseException: The error of an earlier task.
        """
        self.check()
        # No daemon thread: the interpreter waits at its end for a write that is under way.
        self._thread = threading.Thread(
            target=self._run, args=(work, self._thread), name="background"
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of an earlier task, once."""
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def wait(self, beat: Callable[[], object] = lambda: None) -> None:
        """Wait for all tasks; `beat` is called while one progresses, so that the watchdog sees no hang.

        Raises:
            BaseException: The error of a task.
        """
        self.join(beat)
        self.check()

    def join(self, beat: Callable[[], object] = lambda: None) -> None:
        """Wait for all tasks; keep their error for the next `check`."""
        seen = -1
        while self._thread is not None and self._thread.is_alive():
            if self.num_bytes != seen:
                seen = self.num_bytes
                beat()
            # With a timeout, so that the watchdog sees the progress of a long write.
            self._thread.join(0.2)
        self._thread = None

    def moved(self, num_bytes: int) -> None:
        """Add bytes to the progress; called by the task."""
        self.num_bytes += num_bytes

    def _run(self, work: Callable[[], object], before: threading.Thread | None) -> None:
        # Each thread joins the one before it: a queue of tasks without a lock of its own.
        if before is not None:
            before.join()
        if self._error is None:
            try:
                work()
            # Also KeyboardInterrupt and SystemExit: in a thread they
            # would be lost, and with them that a checkpoint is missing.
            except BaseException as error:
                self._error = error
