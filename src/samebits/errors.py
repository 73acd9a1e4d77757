"""Errors for users: the problem with its value, and slots for what was given, where, what is allowed, cause and fix.

A `SamebitsError` prints as one line that states the problem, then one indented line for each slot:

    config error: optim.lrr is not a setting
      given  on the command line: optim.lrr=0.1
      fix    Use optim.lr.

Every other exception is a bug in Samebits or in a recipe, and prints its traceback.
"""

import errno
import re
import textwrap
from typing import Any, ClassVar, Self, TypedDict, TypeVar, Unpack

# Control characters except tab and line feed, line separators, changes of the text direction, and surrogates (bytes of
# file names that are not UTF-8). Names of files, labels and hosts may have them, and a terminal may act on them.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
)
_WIDTH = 68  # of a slot's text: 80 columns less the slot's name
_LABEL = re.compile(r"  ([a-z]+|) +(?=\S)")  # at the start of a line of a slot
_COMMAND = re.compile(r"\b(samebits|torchrun|pip|apt|kill|ssh) ")
_MAX_CHARS = 5000  # of a slot: more than the longest path


class _Slots(TypedDict, total=False):
    given: object
    where: object
    allowed: object
    cause: object
    fix: object


SLOTS = tuple(_Slots.__annotations__)


def printable(text: str) -> str:
    """Replace characters that a terminal may act on by escapes, such as \\x1b."""
    return _UNPRINTABLE.sub(lambda sign: sign[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return a text of unknown origin as one line without control characters."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def wrapped(text: str) -> str:
    """Break a slot's text into lines, so that the whole error fits into 80 columns."""
    return "\n".join(textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False))


def wrap_error(text: str, width: int) -> str:
    """Wrap the lines of an error between words, for a terminal of so many columns.

    The slots `given` and `where`, and lines with a command or a long path, stay whole, since users copy them.
    """
    slot = ""
    lines = []
    for line in text.split("\n"):
        label = _LABEL.match(line)
        slot = label[1] or slot if label is not None else ""
        indent = " " * (len(label[0]) if label is not None else 4)
        has_long_word = any(len(indent) + len(word) > width for word in line.split())
        if slot in ("given", "where") or has_long_word or _COMMAND.search(line):
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, break_on_hyphens=False, subsequent_indent=indent)
    return "\n".join(lines)


def _cut(text: str) -> str:
    """Shorten a text: keys and names in untrusted files may have millions of characters."""
    return (
        text
        if len(text) <= _MAX_CHARS
        else f"{text[:_MAX_CHARS]}… {len(text) - _MAX_CHARS:,} more characters"
    )


class SamebitsError(Exception):
    """A failure that the user can act on.

    Args:
        what: The problem with its value, one sentence.
        given: The values that the user or a file gave.
        where: File, line, rank or machine.
        allowed: The allowed values.
        cause: The underlying reason.
        fix: What the user can do, an imperative sentence such as "Set micro_batch=3 or more."

    Slots are printed in this order. None and empty values are left out; further lines of a value are indented.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        /,
        *,
        given: object | None = None,
        where: object | None = None,
        allowed: object | None = None,
        cause: object | None = None,
        fix: object | None = None,
    ) -> None:
        super().__init__(_cut(what))
        self.what = _cut(what)
        values = zip(SLOTS, (given, where, allowed, cause, fix), strict=True)
        self.slots = {
            name: _cut(str(value)) for name, value in values if value is not None and str(value)
        }

    def with_slots(self, what: str | None = None, /, **slots: Unpack[_Slots]) -> Self:
        """Return a copy with other values in some slots, or with another problem."""
        return type(self)(self.what if what is None else what, **{**self.slots, **slots})

    def __str__(self) -> str:
        width = max((len(name) for name in self.slots), default=0)
        lines = [f"{self.kind}: {printable(self.what)}"]
        for name, value in self._in_order():
            first, *rest = printable(value).split("\n")
            lines.append(f"  {name:<{width}}  {first}")
            lines.extend(f"  {'':<{width}}  {line}" for line in rest)
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """The error in one line, for programs."""
        slots = (f"{name}: {' '.join(value.split())}" for name, value in self._in_order())
        return printable("; ".join([self.what, *slots]))

    def _in_order(self) -> list[tuple[str, str]]:
        # others may have added slots
        return [(name, self.slots[name]) for name in SLOTS if name in self.slots]

    def __reduce__(self) -> tuple[object, ...]:
        notes = getattr(self, "__notes__", None)
        return (
            _rebuild,
            (type(self), self.what, self.slots),
            {"__notes__": notes} if notes else None,
        )


def _rebuild(kind: type[SamebitsError], what: str, slots: dict[str, str]) -> SamebitsError:
    return kind(what, **slots)


class ConfigError(SamebitsError):
    """An invalid setting, recipe or command."""

    kind = "config error"
    exit_code = 2


class DataError(SamebitsError):
    """A dataset that is missing, damaged or of another kind."""

    kind = "data error"
    exit_code = 3


class SampleError(DataError):
    """A dataset of the user's raised an exception. The same run may succeed when it is repeated, such as after a
    failure of a network disk.
    """


class ReaderLost(DataError):
    """A DataLoader worker was killed. The same run may succeed when it is repeated."""


class LaunchError(SamebitsError):
    """A world that cannot start, or that lost a process."""

    kind = "launch error"
    exit_code = 4


class HangError(LaunchError):
    """A world that makes no progress.

    Attributes:
        ranks: The stalled ranks.
    """

    kind = "hang"
    ranks: tuple[int, ...] = ()


class CheckpointError(SamebitsError):
    """A run folder or checkpoint that cannot be written, read or used for this model."""

    kind = "checkpoint error"
    exit_code = 5


class TrainError(SamebitsError):
    """A failure of training itself, such as a loss that is not finite or ranks that differ."""

    kind = "training error"
    exit_code = 6


E = TypeVar("E", bound=SamebitsError)
_KINDS = (
    SamebitsError, ConfigError, DataError, SampleError, ReaderLost, LaunchError, HangError, CheckpointError, TrainError
)  # fmt: skip
# The kinds that other processes may name, by class name.
KINDS: dict[str, type[SamebitsError]] = {kind.__name__: kind for kind in _KINDS}


def to_json(error: SamebitsError) -> dict[str, Any]:
    """Return an error as plain values. A kind that a recipe defined becomes the nearest kind of this package."""
    kind = next(base.__name__ for base in type(error).__mro__ if KINDS.get(base.__name__) is base)
    return {"kind": kind, "what": error.what, "slots": dict(error.slots)}


def from_json(value: Any) -> SamebitsError:
    """Make the error that `to_json` described. Slots of other names are left out.

    Args:
        value: What another process sent or wrote. It may be anything; only classes in `KINDS` are created.

    Raises:
        ValueError: It does not describe an error.
    """
    if not isinstance(value, dict):
        raise ValueError("not an error: no mapping")
    kind, what, slots = (value.get(name) for name in ("kind", "what", "slots"))
    if not (
        isinstance(kind, str)
        and kind in KINDS
        and isinstance(what, str)
        and isinstance(slots, dict)
    ):
        raise ValueError("not an error: its kind, its text or its slots are missing")
    return KINDS[kind](what, **{name: slots[name] for name in SLOTS if name in slots})


def cannot_read(
    kind: type[E], path: object, error: Exception, cure: str, **slots: Unpack[_Slots]
) -> E:
    """Make the error for a file or folder that cannot be read.

    Args:
        cure, **slots: The slot `fix`, and others.
    """
    return kind(
        f"{path} can't be read: {getattr(error, 'strerror', None) or error}",
        **{**slots, "fix": cure},
    )


def cannot_write_result(path: object, error: OSError) -> CheckpointError:
    """Make the error for an output file of a command that cannot be written."""
    return _unwritten(path, error, "choose another path")


def cannot_make(folder: object, error: OSError) -> CheckpointError:
    """Make the error for a new run folder that cannot be made or written to."""
    return _unwritten(f"run folder {folder}", error, "choose another --run-dir")


def _unwritten(what: object, error: OSError, instead: str) -> CheckpointError:
    fix = f"Free disk space, or {instead}." if _is_full(error) else f"{instead.capitalize()}."
    return CheckpointError(f"can't write {what}: {error.strerror or error}", fix=fix)


def cannot_write(path: object, error: OSError) -> CheckpointError:
    """Make the error for a file of a run that cannot be written. Earlier checkpoints are intact."""
    cure = "Free disk space" if _is_full(error) else "Make the folder writable"
    return CheckpointError(
        f"can't write {path}: {error.strerror or error}",
        fix=f"{cure}, then continue with --resume auto: earlier checkpoints, if any, are intact. "
        "Or choose another --run-dir.",
    )


def _is_full(error: OSError) -> bool:
    """Return whether the disk is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out. torch reports it in the text of a RuntimeError."""
    text = str(error)
    is_torch_s = "can't allocate memory" in text or "Storage size calculation overflowed" in text
    return isinstance(error, MemoryError) or is_torch_s


def no_shared_memory(error: OSError) -> LaunchError:
    """Make the error for a machine on which processes cannot share semaphores and memory."""
    return LaunchError(
        f"processes can't share memory on this machine: {error.strerror or error}",
        where="/dev/shm",
        fix="Make /dev/shm writable and larger (in a container: --shm-size 1g), "
        "or run a single process: --procs 1 loader.num_workers=0.",
    )
