"""A notice while a run starts: importing torch, rendezvous and opening the data take seconds."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

QUIET_S = 3.0


@contextmanager
def notice_if_slow(text: str, is_over: Callable[[], bool] = lambda: False, quiet_s: float = QUIET_S) -> Iterator[None]:
    """Print a line, unless it is empty, if the block takes longer than `quiet_s`, in seconds."""

    def say() -> None:
        if text and not is_over():
            # A full disk or a closed pipe: the command itself reports it.
            with suppress(OSError, ValueError):
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()

    timer = threading.Timer(quiet_s, say)
    # An error must be able to end the process while the timer waits.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # Joined, so that the line never appears behind the output of what follows.
        timer.join()
