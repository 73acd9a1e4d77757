"""The limit on open files and connections of this process: raising it, and naming it as the cause of a failure.

Whatever fails at the limit, a file, a socket or a library, reports something else each time. This module
does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TypeVar

from lockstep.errors import LaunchError, LockstepError

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

# More would help nobody, and some systems call no limit a number that the kernel then refuses.
_MOST = 1 << 20
# What a process with loader workers takes; each connection counts.
_FEWEST = 256
# What a process needs for a moment when it reads a file or starts another process.
_ROOM = 16
_TEXT = "too many open files"

E = TypeVar("E", bound=BaseException)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one.

    Each connection to the store takes one, also those of programs that have no business there.

    Raises:
        LaunchError: The hard limit is below what a world takes.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if resource.RLIM_INFINITY != hard < _FEWEST:
        raise too_many_files()


def too_many_files() -> LaunchError:
    """The error of a process that may not open one more file or connection."""
    given = ""
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        given = f"this process may have {limit} open at a time, connections included"
    return LaunchError("too many open files", given=given, fix="raise the limit before you start: ulimit -n 4096")


def is_too_many_files(error: BaseException) -> bool:
    """Whether an error, or what it came from, is that; torch's have it in their text alone."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if getattr(cause, "errno", None) in (errno.EMFILE, errno.ENFILE) or _TEXT in str(cause).lower():
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def out_of_files() -> str:
    """That this process has as many files open as it may, as the cause of a failure; empty if it has not."""
    if resource is None:
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        num_open = soft if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    if soft == resource.RLIM_INFINITY or num_open < soft - _ROOM:
        return ""
    return (
        f"process {os.getpid()} has {num_open:,} files and connections open, of {soft:,} that it may (ulimit -n);\n"
        "another program may have opened many connections to the run's port"
    )


def explained(error: E) -> E | LaunchError:
    """An error with the limit of open files as its cause, where this process has run into it; else as it is."""
    if not isinstance(error, Exception):
        return error
    cause = out_of_files()
    if not cause:
        return too_many_files() if is_too_many_files(error) else error
    fix = "ss -tnp shows which program connects; ulimit -n 65536 before the run allows more"
    if isinstance(error, LockstepError):
        rest = {name: fact for name, fact in error.slots.items() if name not in ("cause", "fix")}
        error.slots = rest | {"cause": cause, "fix": fix}
        return error
    return LaunchError(f"{type(error).__name__}: {error}", cause=cause, fix=fix)
