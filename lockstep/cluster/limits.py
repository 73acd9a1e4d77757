"""Open files: the limit of this process, and whether it has run into it. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import errno
import os

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

# More would help nobody, and some systems call no limit a number that the kernel then refuses.
_MOST = 1 << 20
# What a process needs for a moment when it reads a file or starts another process.
_ROOM = 16


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one.

    Each connection to the store takes one, also those of programs that have no business there.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
        f"this process (pid {os.getpid()}) has {num_open:,} files and connections open, of {soft:,} that it may "
        "(ulimit -n); a program that opens many connections to the run's port can be the reason: ss -tnp"
    )
