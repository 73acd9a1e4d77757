"""The limit of open files and connections of a process: raise it, and report it as the cause of a failure.

At the limit, files, sockets and libraries fail in different ways and with different texts. This module does not import
torch.
"""

import contextlib
import errno
import os
from typing import TypeVar

from samebits.errors import LaunchError, SamebitsError

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

# For an infinite hard limit: some kernels refuse larger values.
_MAX = 1 << 20
# Needed by a process with DataLoader workers and its connections.
_MIN = 256
# Needed for a moment to read a file or to start a process.
_MARGIN = 16
_TEXT = "too many open files"

E = TypeVar("E", bound=BaseException)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one.

    Every connection to the store takes one, also those of unrelated programs.

    Raises:
        LaunchError: The hard limit is below 256.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX if hard == resource.RLIM_INFINITY else min(hard, _MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if resource.RLIM_INFINITY != hard < _MIN:
        raise too_many_files()


def too_many_files() -> LaunchError:
    """Make the error for a process at the limit of open files and connections."""
    given = ""
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        given = f"a limit of {limit} open files and connections"
    return LaunchError(
        "too many open files", given=given, fix="Raise the limit before the start: ulimit -n 4096"
    )


def is_too_many_files(error: BaseException) -> bool:
    """Return whether an error or one of its causes is this limit. torch's errors have it only in their text."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if (
            getattr(cause, "errno", None) in (errno.EMFILE, errno.ENFILE)
            or _TEXT in str(cause).lower()
        ):
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def out_of_files() -> str:
    """Describe this process's open files as the cause of a failure; empty if it is not at its limit."""
    if resource is None:
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        num_open = soft if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    if soft == resource.RLIM_INFINITY or num_open < soft - _MARGIN:
        return ""
    return (
        f"process {os.getpid()} has {num_open:,} of at most {soft:,} files and connections open (ulimit -n);\n"
        "another program may have opened many connections to the run's port"
    )


def explained(error: E) -> E | LaunchError:
    """Add the limit of open files to an error as its cause, if this process is at the limit."""
    if not isinstance(error, Exception):
        return error
    cause = out_of_files()
    if not cause:
        return too_many_files() if is_too_many_files(error) else error
    fix = "Find the connected program with ss -tnp, or raise the limit before the start: ulimit -n 65536"
    if isinstance(error, SamebitsError):
        error.slots |= {"cause": cause, "fix": fix}
        return error
    return LaunchError(f"{type(error).__name__}: {error}", cause=cause, fix=fix)
