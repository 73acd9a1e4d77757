"""Read an untrusted JSON file of annotations, and check each field before it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from samebits.config.plain_file import parse_json, read_plain
from samebits.data.image_file import MAX_PIXELS
from samebits.errors import DataError
from samebits.garbage import without_collections

Floats = npt.NDArray[np.float64]

# No image has so many pixels, and the square of this is still a number: what is larger is a slip.
LARGEST = 1e9
_SHOWN = 60
_FIX = "Correct the annotation file."
MAX_JSON_BYTES = 1 << 31  # COCO's largest file of annotations has 450 MB


class Fields:
    """Fields of a list of entries. A field is checked in all entries before it is used.

    Args:
        entries: JSON objects.
        part: Name of the list in the file.
        path: The file.
        places: Index of each entry in the file's list. None: the entries are the whole list.
    """

    def __init__(
        self, entries: Sequence[dict[str, Any]], part: str, path: Path, places: Sequence[int] | None = None
    ) -> None:
        self._entries, self._part, self._path = entries, part, path
        self._places = range(len(entries)) if places is None else places

    def column(self, field: str, is_good: Callable[[Any], bool], expected: str) -> list[Any]:
        """Return a field of all entries; None for an entry without it, if `is_good` accepts None.

        Args:
            field: Name of the field.
            is_good: Whether a value is valid.
            expected: Description of a valid value, for the error.

        Raises:
            DataError: A value is invalid.
        """
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
        """Return a field that is a list of numbers, of all entries.

        Args:
            field: Name of the field.
            count: Number of values that each entry must have.
            names: Description of the values, for the error.

        Returns:
            (A, count) float64, for A entries.

        Raises:
            DataError: A field is no such list, or one of its values is no number of a plausible size.
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

    def value(self, place: int, field: str) -> Any:
        """Return a field of one entry, unchecked; None if it is missing."""
        return self._entries[place].get(field)

    def unique(self, field: str, values: Sequence[int]) -> None:
        """Refuse a value that comes twice."""
        seen: dict[int, int] = {}
        for place, value in enumerate(values):
            if value in seen:
                raise DataError(
                    f"{field} {value} comes twice in {self._part}",
                    where=f"{self._path}: {self._at(seen[value])} and {self._at(place)}",
                    allowed="a number that no other entry has",
                    fix="Give each entry a unique id.",
                )
            seen[value] = place

    def wrong(self, place: int, field: str, expected: str, item: int | None = None) -> DataError:
        """Make the error of an invalid field, or of one item of a list in it.

        Args:
            place: Index of the entry.
            field: Name of the field.
            expected: What the field may be, for the error.
            item: Index of the invalid item, if the field is a list and only this item is wrong.
        """
        entry = self._entries[place]
        number: Any = entry.get("id")
        is_known = is_whole(number) and abs(number) < 2**64
        kind = "category" if self._part == "categories" else self._part[:-1]
        name = f"{kind} {number if is_known else f'number {self._places[place]}'}"
        if field not in entry:
            return DataError(
                f"{name} has no {field}", where=f"{self._path}: {self._at(place)}", allowed=expected, fix=_FIX
            )
        value = entry[field]
        if item is not None:
            field, value = f"{field}[{item}]", value[item]
        length = f" ({len(value)} of them)" if isinstance(value, list) else ""
        return DataError(
            f"{field} of {name} is {shown(value)}{length}",
            where=f"{self._path}: {self._at(place)}.{field}",
            allowed=expected,
            fix=_FIX,
        )

    def _at(self, place: int) -> str:
        return f"{self._part}[{self._places[place]}]"


def shown(value: Any) -> str:
    """Format a value of the file as JSON, shortened."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "lists or objects that are nested too deeply"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def read_json(path: Path) -> dict[str, Any]:
    """Read an annotation file.

    Raises:
        DataError: It can't be read, or is not an annotation file.
    """
    expected = "a JSON file with images, annotations and categories"
    try:
        with without_collections():  # up to a hundred million new objects
            content = parse_json(read_plain(path, MAX_JSON_BYTES))
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror or error}", allowed=expected, fix="Make it readable."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", allowed=expected, fix="Download it again.") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} contains a {type(content).__name__}, not annotations", allowed=expected, fix="Use another file."
        )
    return content


def entries_of(content: Mapping[str, Any], part: str, path: Path) -> list[dict[str, Any]]:
    """Return one of the lists of the file.

    Args:
        content: The file's content.
        part: Name of the list: "images", "annotations" or "categories".
        path: The file, for errors.

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
            cause="it is a file of results, or of images without annotations" if is_left_out else None,
            fix="Use an annotation file with keypoints.",
        )
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(f"{part}[{place}] of {path} is {shown(entry)}", allowed="an object", fix=_FIX)
    return entries


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number of at least 0."""
    return is_whole(value) and value >= 0


def is_size(value: Any) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return is_whole(value) and value > 0


def is_number(value: Any) -> bool:
    """Return whether a value is a number of a plausible size; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _floats(values: Sequence[Sequence[Any]]) -> Floats:
    """Convert rows of equal length to an array, with NaN for values that are not numbers."""
    # numpy would convert strings to numbers, and true to 1.
    if set(map(type, chain.from_iterable(values))) <= {int, float}:
        with suppress(OverflowError):
            return np.array(values, dtype=np.float64)
    return np.array([[each if is_number(each) else np.nan for each in value] for value in values], dtype=np.float64)


def is_id(value: Any) -> bool:
    """Return whether a value is a whole number of 64 bits."""
    return is_whole(value) and -(2**63) <= value < 2**63


def is_name(value: Any) -> bool:
    """Return whether a value is a file name that stays inside of its folder."""
    if not isinstance(value, str) or not value:
        return False
    name = PurePosixPath(value)
    return not name.is_absolute() and ".." not in name.parts and "\\" not in value and value.isprintable()


def is_side(value: Any) -> bool:
    """Return whether a value is a plausible width or height of an image, in pixels."""
    return is_size(value) and value <= MAX_PIXELS


def check_pixels(widths: Sequence[int], heights: Sequence[int], ids: Sequence[int], path: Path) -> None:
    """Check that no image has more pixels than are decoded.

    Args:
        widths: N widths, pixels.
        heights: N heights, pixels.
        ids: N image numbers, for the error.
        path: The annotation file, for the error.

    Raises:
        DataError: An image has too many.
    """
    for width, height, number in zip(widths, heights, ids, strict=True):
        if width * height > MAX_PIXELS:
            raise DataError(
                f"image {number} is {width}x{height} by its annotation",
                where=path,
                allowed=f"at most {MAX_PIXELS:,} pixels",
                fix="Correct the width and the height, or remove the image.",
            )
