"""Errors for people: what is wrong, its value, where, what is allowed, what to do.

A `LockstepError` prints as one line that says what is wrong, then one indented line for each fact:

    config error: optim.lrr is not a setting
      given    on the command line: optim.lrr=0.1
      nearest  optim.lr (float, now 0.05)

Anything else that is raised is a fault of ours, and shows its traceback.
"""

from __future__ import annotations

import errno
import re
import resource
from typing import ClassVar

# Control characters but tab and line feed, separators of lines, changes of the direction of writing, and bytes of file
# names that are no text. A terminal may obey them: they come from names of files, labels and hosts.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
)


_RAISE_LIMIT = "ulimit -n 4096"


def printable(text: str) -> str:
    """A text that does nothing to a terminal: what is not to be printed is written as an escape, such as \\x1b."""
    return _UNPRINTABLE.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)


class LockstepError(Exception):
    """A fault that a person can act on.

    Args:
        what: One line: what is wrong, with the value that is wrong.
        facts: What else there is to know, in order: `given`, `where`, `allowed`, `nearest`, `likely`, `do` ...
            A fact that is None or empty is left out; a fact of several lines is indented below its name.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, /, **facts: object) -> None:
        super().__init__(what)
        self.what = what
        self.facts = {name: str(value) for name, value in facts.items() if value is not None and str(value)}

    def __str__(self) -> str:
        width = max((len(name) for name in self.facts), default=0)
        lines = [f"{self.kind}: {printable(self.what)}"]
        for name, value in self.facts.items():
            first, *rest = printable(value).split("\n")
            lines.append(f"  {name:<{width}}  {first}")
            lines.extend(f"  {'':<{width}}  {line}" for line in rest)
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """All of it in one line, for programs."""
        facts = (f"{name}: {' '.join(value.split())}" for name, value in self.facts.items())
        return printable("; ".join([self.what, *facts]))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.facts))


def _rebuild(kind: type[LockstepError], what: str, facts: dict[str, str]) -> LockstepError:
    return kind(what, **facts)


class ConfigError(LockstepError):
    """A setting, a recipe or a command that can't be."""

    kind = "config error"
    exit_code = 2


class DataError(LockstepError):
    """A data set that is missing, damaged or not what it claims to be."""

    kind = "data error"
    exit_code = 3


class ReaderLost(DataError):
    """A process that read samples was killed; the same may well go well another time."""


class LaunchError(LockstepError):
    """A world that can't start, or lost one of its processes."""

    kind = "launch error"
    exit_code = 4


class HangError(LaunchError):
    """A world in which nothing gets on any more.

    Attributes:
        ranks: Which hold it up.
    """

    kind = "hang"
    ranks: tuple[int, ...] = ()


class CheckpointError(LockstepError):
    """A run folder or checkpoint that can't be written, read or used for this model."""

    kind = "checkpoint error"
    exit_code = 5


class TrainError(LockstepError):
    """Training itself went wrong: a loss that is not finite, ranks that differ."""

    kind = "training error"
    exit_code = 6


def cannot_write_result(path: object, error: OSError) -> CheckpointError:
    """The text for a file that a person has asked for, and that could not be written."""
    return _unwritten(path, error, "give another place")


def cannot_make(folder: object, error: OSError) -> CheckpointError:
    """The text for a run's folder that can't be made or written to, before there is anything in it to keep."""
    return _unwritten(f"run folder {folder}", error, "give another --run-dir")


def _unwritten(what: object, error: OSError, instead: str) -> CheckpointError:
    room = "make room or " if _is_full(error) else ""
    return CheckpointError(f"can't write {what}: {error.strerror or error}", do=f"{room}{instead}")


def cannot_write(path: object, error: OSError) -> CheckpointError:
    """The text for a file of a run that could not be written."""
    cure = "make room" if _is_full(error) else "see that it can be written"
    if is_too_many_files(error):
        cure = f"raise the limit ({_RAISE_LIMIT})"
    return CheckpointError(
        f"can't write {path}: {error.strerror or error}",
        kept="what was saved before is whole",
        do=f"{cure} or give another --run-dir; then go on with --resume auto",
    )


def _is_full(error: OSError) -> bool:
    """Whether more room on the disk would have helped."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def too_many_files() -> LaunchError:
    """The text for a process that may not open one more file or connection."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return LaunchError(
        "too many open files",
        given=f"this process may have {limit} open at a time, connections included",
        do=f"raise the limit before you start: {_RAISE_LIMIT}",
    )


def is_too_many_files(error: BaseException) -> bool:
    """Whether an error is that, also one of torch's, which has it in its text alone."""
    number = getattr(error, "errno", None)
    return number in (errno.EMFILE, errno.ENFILE) or "too many open files" in str(error).lower()


def no_shared_memory(error: OSError) -> LaunchError:
    """The text for a machine on which processes can't share semaphores and memory."""
    if is_too_many_files(error):
        return too_many_files()
    return LaunchError(
        f"processes can't share memory on this machine: {error.strerror or error}",
        where="/dev/shm",
        do="give /dev/shm room and make it writable (in a container: --shm-size 1g); "
        "or one process without others: --procs 1 loader.num_workers=0",
    )
