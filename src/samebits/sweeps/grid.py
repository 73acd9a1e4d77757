"""The values of a sweep, as texts of the command line: `optim.lr=0.1,0.03 seed=0:3`, or ranges to search in."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from samebits.errors import ConfigError

MAX_TRIALS = 10_000
_RANGE = re.compile(r"(-?\d{1,9}):(-?\d{1,9})(?::(\d{1,9}))?")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_INTERVAL = re.compile(rf"({_NUMBER}):({_NUMBER})(:log)?")
_CLOSING = {"[": "]", "{": "}", "'": "'", '"': '"'}


@dataclass(frozen=True)
class Axis:
    """A setting and the values that a sweep gives it."""

    key: str  #: Its dotted name.
    values: tuple[str, ...]  #: The values, as the command line has them.


@dataclass(frozen=True)
class SearchInterval:
    """A setting and the interval that a search chooses its values from."""

    key: str  #: Its dotted name.
    low: float  #: Lowest value.
    high: float  #: Highest value, included.
    is_log: bool  #: Whether the logarithm of the value is distributed evenly.
    is_whole: bool  #: Whether the values are whole numbers.


def parse_grid(texts: Sequence[str]) -> list[Axis]:
    """Parse the values of `--grid`. Raises ConfigError if a text has another form, or a setting is named twice."""
    axes = [_axis(text, "--grid") for text in texts]
    _check_names([axis.key for axis in axes], "--grid")
    return axes


def parse_space(texts: Sequence[str]) -> list[Axis | SearchInterval]:
    """Parse the values of `--space`: `optim.lr=1e-4:1e-1:log`, `model.width=16:64`, `optim.name=sgd,adamw`.

    Raises:
        ConfigError: A text has another form, or a setting is named twice.
    """
    dimensions = [_dimension(text) for text in texts]
    _check_names([each.key for each in dimensions], "--space")
    return dimensions


def combinations(axes: Sequence[Axis]) -> list[list[str]]:
    """Return the settings of each trial, as overrides; the last axis changes fastest.

    Raises:
        ConfigError: There are too many.
    """
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_TRIALS:
        raise ConfigError(f"the grid has {count:,} trials", allowed=f"at most {MAX_TRIALS:,}", fix="Name fewer values.")
    columns = [[f"{axis.key}={value}" for value in axis.values] for axis in axes]
    return [list(each) for each in itertools.product(*columns)]


def _axis(text: str, option: str) -> Axis:
    key, equals, rest = text.partition("=")
    values = [each for piece in _pieces(rest) for each in _expanded(piece)]
    if not equals or not key.strip() or not all(values):
        raise ConfigError(
            f"{option} has {text!r}",
            allowed="KEY=VALUE,VALUE or KEY=START:STOP, such as optim.lr=0.1,0.03 seed=0:3",
            fix="Write the values without spaces; put a list or a text with a comma in brackets or quotes.",
        )
    if len(set(values)) < len(values):
        raise ConfigError(f"{option} has a value of {key} twice", given=text, fix="Name each value once.")
    return Axis(key.strip(), tuple(values))


def _expanded(piece: str) -> list[str]:
    """Return the numbers of a range such as 0:3, which are 0, 1 and 2; any other text as it is."""
    match = _RANGE.fullmatch(piece)
    if match is None:
        return [piece]
    numbers = range(int(match[1]), int(match[2]), int(match[3] or 1) or 1)
    # Before a list is made of it: a range knows its length without its numbers.
    if len(numbers) > MAX_TRIALS:
        raise ConfigError(
            f"the range {piece} has {len(numbers):,} values", allowed=f"at most {MAX_TRIALS:,}", fix="Name fewer."
        )
    # An empty range becomes an empty text, which `_axis` refuses.
    return [str(number) for number in numbers] or [""]


def _pieces(text: str) -> list[str]:
    """Split at the commas that are outside of brackets and quotes."""
    pieces, closing = [""], list[str]()
    for char in text:
        if char == "," and not closing:
            pieces.append("")
            continue
        if closing and char == closing[-1]:
            closing.pop()
        elif char in _CLOSING and not (closing and closing[-1] in "'\""):
            closing.append(_CLOSING[char])
        pieces[-1] += char
    return [piece.strip() for piece in pieces]


def _dimension(text: str) -> Axis | SearchInterval:
    key, _, rest = text.partition("=")
    match = _INTERVAL.fullmatch(rest.strip())
    if match is None:
        return _axis(text, "--space")
    low, high, is_log = float(match[1]), float(match[2]), match[3] is not None
    if not key.strip() or not low < high or (is_log and low <= 0):
        raise ConfigError(
            f"--space has {text!r}",
            allowed="KEY=LOW:HIGH with LOW below HIGH, and above 0 with :log",
            fix="Give an interval such as optim.lr=1e-4:1e-1:log.",
        )
    is_whole = all(re.fullmatch(r"[+-]?\d+", match[number]) for number in (1, 2))
    return SearchInterval(key.strip(), low, high, is_log, is_whole)


def _check_names(keys: Sequence[str], option: str) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{option} names {key} twice", fix="Name each setting once, with all of its values.")
