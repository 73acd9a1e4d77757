"""Open files: the limit of this process, and whether it has run into it. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import errno
import os

from lockstep.errors import LaunchError, LockstepError, too_many_files

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


def explained(error: BaseException) -> BaseException:
    """An error with the limit of open files as its cause, where this process has run into it; else as it is.

    Whatever fails then, a file, a socket or a library, says something else each time.
    """
    cause = out_of_files()
    if not cause or not isinstance(error, Exception):
        return error
    fix = "ss -tnp shows which program connects; ulimit -n 65536 before the run allows more"
    if isinstance(error, LockstepError):
        rest = {name: fact for name, fact in error.slots.items() if name not in ("cause", "fix")}
        error.slots = rest | {"cause": cause, "fix": fix}
        return error
    return LaunchError(f"{type(error).__name__}: {error}", cause=cause, fix=fix)
