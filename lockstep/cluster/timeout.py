"""Calls into native code that may never come back, made so that this process stays able to hear and to give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_with_timeout(call: Callable[[], T], limit_s: float, tick: Callable[[float], None]) -> T:
    """The call's result.

    Args:
        call: Runs in a thread of its own; nobody ends it where it takes too long.
        limit_s: How long it may take.
        tick: Called every few milliseconds with the seconds that have passed; may raise.

    Raises:
        TimeoutError: It takes longer than the limit.
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
        thread.join(0.02)
        waited_s = time.monotonic() - start
        tick(waited_s)
        if waited_s > limit_s:
            raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]
