"""End this process when its main thread cannot return: from another thread, or during a blocked native call.

This module does not import torch.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from samebits.errors import SamebitsError

_notify: Callable[[SamebitsError], object] | None = None
_record: Callable[[BaseException], object] | None = None


def notify_with(notify: Callable[[SamebitsError], object]) -> None:
    """Set the function that reports the final error instead of stderr, for example to the launcher."""
    global _notify
    _notify = notify


def record_with(record: Callable[[BaseException], object]) -> None:
    """Set the function that writes the reason of a failure to disk."""
    global _record
    _record = record


def record(error: BaseException) -> None:
    """Write the reason of a failure to disk before this process closes its connections.

    Peers fail as soon as they lose this process, and the launcher then ends all processes. On a busy machine that can
    happen before this process has ended, so its reason must be on disk by then.
    """
    if _record is not None:
        _record(error)


def abort(error: SamebitsError) -> NoReturn:
    """End this process at once with the error's text and exit code. Any thread may call it."""
    if _notify is not None:
        _notify(error)
    else:
        # A closed pipe must not keep the process alive.
        with suppress(OSError, ValueError):
            print(f"\n{error}", file=sys.stderr, flush=True)
    # Not sys.exit, which in another thread than the main one ends only that thread.
    os._exit(error.exit_code)


def leave(code: int) -> NoReturn:
    """Exit with a code, even while a daemon thread is in a native call, such as one of torch's store.

    Python's own shutdown would unwind such a thread inside C++ code, which raises SIGABRT and changes the exit code.
    """
    if not any(thread.daemon for thread in threading.enumerate()):
        sys.exit(code)
    # `os._exit` skips exit functions, and Python has no public call for them.
    atexit._run_exitfuncs()
    flush()
    os._exit(code)


def flush() -> None:
    """Write what is printed so far, before `os._exit`, which does not."""
    for stream in (sys.stdout, sys.stderr):
        # A closed pipe must not hide how the work ended.
        with suppress(OSError, ValueError):
            stream.flush()
