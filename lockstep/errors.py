"""Errors for users: the problem with its value, and slots for what was given, where, what is allowed, cause and fix.

A `LockstepError` prints as one line that states the problem, then one indented line for each slot:

    config error: optim.lrr is not a setting
      given    on the command line: optim.lrr=0.1
      nearest  optim.lr (float, now 0.05)

Any other exception is a bug in Lockstep or in a recipe, and shows its traceback.
"""

from __future__ import annotations

import errno
import re
from typing import ClassVar

# Control characters but tab and line feed, separators of lines, changes of the direction of writing, and bytes of file
# names that are no text. A terminal may obey them: they come from names of files, labels and hosts.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
)
_MAX_CHARS = 5000  # of each slot: more than the longest path


def printable(text: str) -> str:
    """A text that does nothing to a terminal: what is not to be printed is written as an escape, such as \\x1b."""
    return _UNPRINTABLE.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)


def _cut(text: str) -> str:
    """Shorten a text: keys and names in a stranger's file may have millions of characters."""
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}… {len(text) - _MAX_CHARS:,} more characters"


class LockstepError(Exception):
    """A failure that the user can act on.

    Args:
        what: One line: what is wrong, with the value that is wrong.
        slots: What else there is to know, in order: `given`, `where`, `allowed`, `cause`, `fix`.
            A fact that is None or empty is left out; a fact of several lines is indented below its name.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, /, **slots: object) -> None:
        super().__init__(_cut(what))
        self.what = _cut(what)
        self.slots = {name: _cut(str(value)) for name, value in slots.items() if value is not None and str(value)}

    def __str__(self) -> str:
        width = max((len(name) for name in self.slots), default=0)
        lines = [f"{self.kind}: {printable(self.what)}"]
        for name, value in self.slots.items():
            first, *rest = printable(value).split("\n")
            lines.append(f"  {name:<{width}}  {first}")
            lines.extend(f"  {'':<{width}}  {line}" for line in rest)
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """All of it in one line, for programs."""
        slots = (f"{name}: {' '.join(value.split())}" for name, value in self.slots.items())
        return printable("; ".join([self.what, *slots]))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.slots))


def _rebuild(kind: type[LockstepError], what: str, slots: dict[str, str]) -> LockstepError:
    return kind(what, **slots)


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
    return CheckpointError(f"can't write {what}: {error.strerror or error}", fix=f"{room}{instead}")


def cannot_write(path: object, error: OSError) -> CheckpointError:
    """The text for a file of a run that could not be written."""
    cure = "make room" if _is_full(error) else "see that it can be written"
    return CheckpointError(
        f"can't write {path}: {error.strerror or error}",
        kept="what was saved before is whole",
        fix=f"{cure} or give another --run-dir; then go on with --resume auto",
    )


def _is_full(error: OSError) -> bool:
    """Whether more room on the disk would have helped."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short; torch reports it only in the text of a RuntimeError."""
    text = str(error)
    is_torch_s = "can't allocate memory" in text or "Storage size calculation overflowed" in text
    return isinstance(error, MemoryError) or is_torch_s


def no_shared_memory(error: OSError) -> LaunchError:
    """The text for a machine on which processes can't share semaphores and memory."""
    return LaunchError(
        f"processes can't share memory on this machine: {error.strerror or error}",
        where="/dev/shm",
        fix="give /dev/shm room and make it writable (in a container: --shm-size 1g); "
        "or one process without others: --procs 1 loader.num_workers=0",
    )
