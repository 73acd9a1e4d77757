"""Lists of entries in a JSON file of another's making, each field looked at before it is used."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from lockstep.config.plain_file import parse_json, read_plain
from lockstep.errors import DataError
from lockstep.recipes.pose.affine import Floats

# No image has so many pixels, and the square of this is still a number: what is larger is a slip.
LARGEST = 1e9
_SHOWN = 60
MAX_JSON_BYTES = 1 << 31  # COCO's largest file of annotations has 450 MB


class Fields:
    """The fields of a list of entries, each checked in all of them before it is used.

    Args:
        entries: JSON objects.
        part: What the file calls their list.
        path: The file.
        places: Of each entry its place in the file's list; None: they are all of it.
    """

    def __init__(
        self, entries: Sequence[dict[str, Any]], part: str, path: Path, places: Sequence[int] | None = None
    ) -> None:
        self._entries, self._part, self._path = entries, part, path
        self._places = range(len(entries)) if places is None else places

    def column(self, field: str, is_good: Callable[[Any], bool], expected: str) -> list[Any]:
        """The field of all entries; None where an entry has none, if that is good."""
        values = [entry.get(field) for entry in self._entries]
        for place, value in enumerate(values):
            try:
                fits = is_good(value)
            except TypeError:
                fits = False
            if not fits:
                raise self.wrong(place, field, expected)
        return values

    def numbers(self, field: str, count: int, names: str) -> Floats:
        """(A, count) numbers.

        Args:
            field: Its name.
            count: How many each entry has to have.
            names: What they are.
        """
        values = self.column(
            field, lambda value: isinstance(value, list) and len(value) == count, f"{count} numbers: {names}"
        )
        array = _floats(values).reshape(-1, count)
        fits = np.abs(array) <= LARGEST
        if not fits.all():
            place, item = (int(number) for number in np.argwhere(~fits)[0])
            raise self.wrong(place, field, f"a number up to {LARGEST:,.0f}; {count} of them: {names}", item)
        return array

    def unique(self, field: str, values: Sequence[int]) -> None:
        """Refuse a value that comes twice."""
        seen: dict[int, int] = {}
        for place, value in enumerate(values):
            if value in seen:
                raise DataError(
                    f"{field} {value} comes twice in {self._part}",
                    where=f"{self._path}: {self._at(seen[value])} and {self._at(place)}",
                    allowed="a number that no other entry has",
                )
            seen[value] = place

    def wrong(self, place: int, field: str, expected: str, item: int | None = None) -> DataError:
        """What to say of an entry's field, or of one item of a list there."""
        entry = self._entries[place]
        number: Any = entry.get("id")
        is_known = is_whole(number) and abs(number) < 2**64
        name = f"{self._part[:-1]} {number if is_known else f'number {self._places[place]}'}"
        if field not in entry:
            return DataError(f"{name} has no {field}", where=f"{self._path}: {self._at(place)}", allowed=expected)
        value = entry[field]
        if item is not None:
            field, value = f"{field}[{item}]", value[item]
        length = f" ({len(value)} of them)" if isinstance(value, list) else ""
        return DataError(
            f"{field} of {name} is {shown(value)}{length}",
            where=f"{self._path}: {self._at(place)}.{field}",
            allowed=expected,
        )

    def _at(self, place: int) -> str:
        return f"{self._part}[{self._places[place]}]"


def shown(value: Any) -> str:
    """A value of the file as one sees it there, its beginning if it is long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "lists or objects that are nested too deeply"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def read_json(path: Path) -> dict[str, Any]:
    """An annotation file's parts.

    Raises:
        DataError: It cannot be read, or is no such file.
    """
    expected = "a JSON file with images, annotations and categories"
    # The collector would go through a hundred million new objects again and again, and find nothing.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        content = parse_json(read_plain(path, MAX_JSON_BYTES))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", allowed=expected) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", allowed=expected) from error
    finally:
        if was_enabled:
            gc.enable()
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, no annotations", allowed=expected)
    return content


def entries_of(content: Mapping[str, Any], part: str, path: Path) -> list[dict[str, Any]]:
    """One of the file's lists.

    Raises:
        DataError: There is no such list of objects.
    """
    entries = content.get(part)
    if not isinstance(entries, list):
        is_left_out = part not in content and "images" in content
        raise DataError(
            f"{path} has no list of {part}",
            given=f"its parts: {', '.join(content) or 'none'}",
            allowed="images, annotations and categories",
            cause="a file of results, or of images only" if is_left_out else None,
        )
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(f"{part}[{place}] of {path} is {shown(entry)}", allowed="an object")
    return entries


def is_whole(value: Any) -> bool:
    """A whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """A whole number from 0."""
    return is_whole(value) and value >= 0


def is_size(value: Any) -> bool:
    """A whole number from 1."""
    return is_whole(value) and value > 0


def is_number(value: Any) -> bool:
    """A number of a size that pixels have; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _floats(values: Sequence[Sequence[Any]]) -> Floats:
    """Rows of equal length -> an array, not a number where a value is none that is allowed."""
    # numpy would read texts as numbers, and true as 1.
    if set(map(type, chain.from_iterable(values))) <= {int, float}:
        with suppress(OverflowError):
            return np.array(values, dtype=np.float64)
    return np.array([[each if is_number(each) else np.nan for each in value] for value in values], dtype=np.float64)


def is_name(value: Any) -> bool:
    """A file's name that does not lead out of its folder."""
    if not isinstance(value, str) or not value:
        return False
    name = PurePosixPath(value)
    return not name.is_absolute() and ".." not in name.parts and "\\" not in value and value.isprintable()
