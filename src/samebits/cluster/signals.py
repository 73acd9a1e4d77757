"""Turn the first stop signal into a request: finish the step, save, exit. This module does not import torch."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import connection, parent_process
from types import FrameType

from samebits.cluster.env import LAUNCHED

# A terminal or scheduler sends these to every process of a job. Where there is a launcher, only it handles them.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Whether this process received a stop signal. The other ranks stop because one rank did.
was_stop_requested = False


@contextmanager
def handled(
    numbers: Iterable[signal.Signals], handle: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals in this context, in the main thread: Python can set handlers only there."""
    before = {}
    for number in numbers if threading.current_thread() is threading.main_thread() else ():
        # Ignored signals stay so, such as SIGHUP under nohup; but a shell ignores SIGINT for a job in the background.
        if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: the handler was not set from Python, and cannot be restored from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopSignal:
    """Context manager in which SIGTERM requests a stop instead of ending the process.

    SIGINT (Ctrl-C), SIGHUP (a closed terminal), SIGUSR1 and SIGUSR2 (a scheduler's warning) do the same, except in
    workers of Samebits's launcher: there the launcher receives these and forwards SIGTERM. A second signal more than
    `patience_s` later ends the process at once. Within that time it counts as the same signal, because a terminal, a
    launcher and a scheduler may each send one.

    Use it in the main thread: in others, no stop is ever requested. It restores the earlier handlers on exit.

    Args:
        patience_s: Time within which signals count as one, seconds.
        on_stop: Called with the signal's name when a stop is requested.
    """

    def __init__(
        self, patience_s: float = 1.0, on_stop: Callable[[str], None] | None = None
    ) -> None:
        self.patience_s = patience_s
        self.signal: signal.Signals | None = None
        self._on_stop = on_stop
        self._since = 0.0
        self._handled: AbstractContextManager[None] = nullcontext()

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Return 128 + the signal's number, as shells do; 0 if no stop was requested."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> "StopSignal":
        self._handled = handled(
            (signal.SIGTERM,) if os.environ.get(LAUNCHED) else STOP_SIGNALS, self._handle
        )
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        global was_stop_requested
        now = time.monotonic()
        was_stop_requested = True
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._since = now
            if self._on_stop is not None:
                self._on_stop(self.signal.name)
        elif now - self._since > self.patience_s:
            os._exit(128 + number)


def when_parent_dies(then: Callable[[], None]) -> None:
    """Call `then` from a daemon thread when the parent process has ended.

    For processes of multiprocessing, whose parent may be killed before it ends them.
    """

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            # The sentinel's other end is in the parent, and closes however the parent ends.
            connection.wait([parent.sentinel])
        else:
            pid = os.getppid()
            # A process whose parent has ended gets another parent.
            while os.getppid() == pid:
                time.sleep(0.5)
        then()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def exit_with_parent() -> None:
    """End this process at once when its parent ends: for DataLoader workers, which have nothing to save."""
    when_parent_dies(lambda: os._exit(1))


def end_group(leader: int) -> None:
    """Kill the processes of a group, such as those that a script or package has left; nothing if there are none."""
    # PermissionError: some systems answer so for a group of which only zombies are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
