"""Run blocking native calls under a deadline, and format the time left for log lines."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Interval between log lines while a process waits for others.
REPORT_EVERY_S = 5.0


def call_with_timeout(
    call: Callable[[], T], limit_s: float, tick: Callable[[float], None] = lambda waited_s: None
) -> T:
    """Run a call in a thread, and return its result, or raise its exception, within a limit; call `tick` meanwhile.

    The thread is a daemon that nothing can interrupt: after a timeout it stays in the native call, and `abort.leave`
    ends the process without it.

    Raises:
        TimeoutError: The call takes longer than `limit_s`.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    start = time.monotonic()
    thread.start()
    while thread.is_alive():
        # Short, since Python runs signal handlers only between two joins.
        thread.join(0.02)
        waited_s = time.monotonic() - start
        tick(waited_s)
        if waited_s > limit_s:
            raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]


def wait_until(condition: Callable[[], object], limit_s: float, pause_s: float) -> bool:
    """Wait until a condition holds, with a pause between two looks; return whether it does within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


class CallThread:
    """A thread that makes one call after the other, for a thread that may stop waiting for them.

    Attributes:
        calls: What it calls; None ends it.
        answers: The result of each call, or its exception.
    """

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        # A daemon: at the end of the process it may still be in a native call.
        threading.Thread(target=self._run, name="call", daemon=True).start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                self.answers.put((call(), None))
            except BaseException as error:
                self.answers.put((None, error))
            # Until the next call it would keep what it refers to, such as a process group that is destroyed.
            del call


def as_clock(seconds: float) -> str:
    """Format a duration as minutes and seconds: 4:48."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
