"""A person or a machine asks the process to stop: finish the step, save, exit. Nothing here imports torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection, parent_process
from types import FrameType, TracebackType

from lockstep.cluster.env import LAUNCHED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# Whether this process itself was asked; other ranks stop because one was.
was_stop_requested = False


class StopSignal:
    """While it is open, SIGTERM asks for a stop instead of ending the process.

    So do SIGINT (Ctrl-C), SIGHUP (a terminal that is closed), SIGUSR1 and SIGUSR2 (a scheduler's warning), unless our
    own launcher runs the process: then it is the launcher that gets these, and sends SIGTERM on. A second signal more
    than `patience_s` later ends the process at once. (Within it, it is taken for the same one: a terminal, a launcher
    and a scheduler may each send theirs.)

    Use it in the main thread, as a context manager; earlier handlers come back at its end.
    """

    def __init__(self, patience_s: float = 1.0, on_stop: Callable[[str], None] | None = None) -> None:
        self.patience_s = patience_s
        self.signal: signal.Signals | None = None
        self._on_stop = on_stop
        self._since = 0.0
        self._before: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether somebody has asked."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell would say it; 0 if nobody asked."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> StopSignal:
        # A thread can't set handlers; there, nobody asks.
        if threading.current_thread() is threading.main_thread():
            launched = bool(os.environ.get(LAUNCHED))
            for number in (signal.SIGTERM,) if launched else STOP_SIGNALS:
                # nohup: whoever started us wants a closed terminal to be ignored.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not set from Python, and can't be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]  # mypy has no type for what getsignal gives
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        global was_stop_requested
        now = time.monotonic()
        was_stop_requested = True
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), now
            if self._on_stop is not None:
                self._on_stop(self.signal.name)
        elif now - self._since > self.patience_s:
            os._exit(128 + number)


def when_parent_dies(then: Callable[[], None]) -> None:
    """Call `then` from a daemon thread once the process that started this one is gone.

    For processes made by multiprocessing, whose parent may be killed without a chance to end them.
    """

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            connection.wait([parent.sentinel])
        else:
            pid = os.getppid()
            while os.getppid() == pid:
                time.sleep(0.5)
        then()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def exit_with_parent() -> None:
    """End this process at once when its parent is gone: for loader workers, which have nothing to save."""
    when_parent_dies(lambda: os._exit(1))
