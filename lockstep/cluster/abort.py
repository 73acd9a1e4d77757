"""The end of a process whose main thread does not come to one. Nothing here imports torch."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from lockstep.errors import LockstepError

# Threads that call torch's store, and may be there for ever. `asking.in_thread` and others name them so.
_IN_STORE = {"rendezvous", "rendezvous-watch", "clock", "store-client", "connect-monitor"}

_tell: Callable[[LockstepError], object] | None = None
_record: Callable[[BaseException], object] | None = None


def notify_with(tell: Callable[[LockstepError], object]) -> None:
    """Somebody else says how this process has ended: its launcher."""
    global _tell
    _tell = tell


def record_with(record: Callable[[BaseException], object]) -> None:
    """Set what writes down why this process fails."""
    global _record
    _record = record


def record(error: BaseException) -> None:
    """Write down why this process fails, before its connections close.

    Its peers fail as soon as they lose it. On a busy machine they may be gone long before this process is, and the
    launcher ends it then: what it failed of must be on disk by that time.
    """
    if _record is not None:
        _record(error)


def abort(error: LockstepError) -> NoReturn:
    """End this process at once, from any thread, with an error's text and exit code."""
    if _tell is not None:
        _tell(error)
    else:
        # A closed pipe is no reason to stay.
        with suppress(OSError, ValueError):
            print(f"\n{error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def leave(code: int) -> NoReturn:
    """End this process with an exit code.

    Where a thread still waits for a store, Python's own end would unwind it in the middle of C++, which aborts the
    process with SIGABRT in place of the code.
    """
    if not any(thread.name in _IN_STORE for thread in threading.enumerate()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
