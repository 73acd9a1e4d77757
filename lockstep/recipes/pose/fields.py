"""Lists of entries in a JSON file of another's making, each field looked at before it is used."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from lockstep.errors import DataError
from lockstep.recipes.pose.affine import Floats


class Fields:
    """The fields of a list of entries, each checked in all of them before it is used.

    Args:
        entries: JSON objects.
        part: What the file calls their list.
        path: The file.
    """

    def __init__(self, entries: Sequence[dict[str, Any]], part: str, path: Path) -> None:
        self._entries, self._part, self._path = entries, part, path

    def column(self, field: str, is_good: Callable[[Any], bool], expected: str) -> list[Any]:
        """The field of all entries; None where an entry has none, if that is good."""
        values = [entry.get(field) for entry in self._entries]
        for place, value in enumerate(values):
            try:
                fits = is_good(value)
            except TypeError:
                fits = False
            if not fits:
                raise self._wrong(place, field, expected)
        return values

    def numbers(self, field: str, count: int, expected: str) -> Floats:
        """(A, count) finite numbers."""
        values = self.column(field, lambda value: isinstance(value, list) and len(value) == count, expected)
        try:
            array = np.array(values, dtype=np.float64).reshape(-1, count)
        except (TypeError, ValueError):
            array = np.array([[_number(each) for each in value] for value in values]).reshape(-1, count)
        is_finite = np.isfinite(array).all(axis=1)
        if not is_finite.all():
            raise self._wrong(int(np.argmin(is_finite)), field, expected)
        return array

    def unique(self, field: str, values: Sequence[int]) -> None:
        """Refuse a value that comes twice."""
        seen: set[int] = set()
        for place, value in enumerate(values):
            if value in seen:
                raise self._wrong(place, field, "a number that no other entry has")
            seen.add(value)

    def _wrong(self, place: int, field: str, expected: str) -> DataError:
        entry = self._entries[place]
        name = f"{self._part[:-1]} {entry.get('id', f'number {place}')}"
        if field not in entry:
            return DataError(f"{name} has no {field}", where=f"{self._path}: {self._part}[{place}]", expected=expected)
        text = json.dumps(entry[field])
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        length = f" ({len(entry[field])} of them)" if isinstance(entry[field], list) else ""
        return DataError(
            f"{field} of {name} is {shown}{length}",
            where=f"{self._path}: {self._part}[{place}].{field}",
            expected=expected,
        )


def read_json(path: Path) -> dict[str, Any]:
    """An annotation file's parts.

    Raises:
        DataError: It can't be read, or is no such file.
    """
    expected = "a JSON file with images, annotations and categories"
    # The collector would go through a hundred million new objects again and again, and find nothing.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with path.open("rb") as file:
            content = json.load(file)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}", expected=expected) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", expected=expected) from error
    finally:
        if was_enabled:
            gc.enable()
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, no annotations", expected=expected)
    return content


def entries_of(content: Mapping[str, Any], part: str, path: Path) -> list[dict[str, Any]]:
    """One of the file's lists.

    Raises:
        DataError: There is no such list of objects.
    """
    entries = content.get(part)
    if not isinstance(entries, list):
        likely = "a file of results, or of pictures only" if "images" in content else None
        raise DataError(
            f"{path} has no list of {part}",
            given=f"its parts: {', '.join(content) or 'none'}",
            expected="images, annotations and categories",
            likely=likely,
        )
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(f"{part}[{place}] of {path} is a {type(entry).__name__}", expected="an object")
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
    """A number that is finite."""
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def is_name(value: Any) -> bool:
    """A file's name that does not lead out of its folder."""
    if not isinstance(value, str) or not value:
        return False
    name = PurePosixPath(value)
    return not name.is_absolute() and ".." not in name.parts and "\\" not in value and "\0" not in value
