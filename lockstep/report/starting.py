"""A sign of life while a run starts: processes import torch, meet, and open their data before they can say more."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

QUIET_S = 3.0


@contextmanager
def notice_if_slow(text: str, is_over: Callable[[], bool] = lambda: False, quiet_s: float = QUIET_S) -> Iterator[None]:
    """Write a line if the block is still going on after a while, and what it tells of is not over.

    Args:
        text: The line; empty for none.
        is_over: Whether it would come too late.
        quiet_s: How long to wait with it.
    """

    def say() -> None:
        if text and not is_over():
            # A full disk or a reader that went away: the command that it interrupts says so, if it is told at all.
            with suppress(OSError, ValueError):
                sys.stdout.write(f"{text}\n")
                sys.stdout.flush()

    timer = threading.Timer(quiet_s, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
