"""Read an untrusted annotation file in COCO's format. A wrong field is named with its place in the file."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from faster_coco_eval import COCO
from pydantic import AfterValidator, BaseModel, Field, PlainValidator, TypeAdapter, ValidationError, ValidationInfo

from samebits.config.plain_file import parse_json, read_plain
from samebits.data.image_file import MAX_PIXELS
from samebits.errors import DataError
from samebits.garbage import without_collections

# No image has so many pixels, and the square of this is still a number: what is larger is a slip.
LARGEST = 1e9
MAX_JSON_BYTES = 1 << 31  # COCO's largest file of annotations has 450 MB
_SHOWN = 60
_FIX = "Correct the annotation file."
_EXPECTED = "a JSON file with images, annotations and categories"
_PARTS = {"images": "image", "annotations": "annotation", "categories": "category"}


def _inside(name: str) -> str:
    name = name.replace("\\", "/")  # as tools on Windows write it
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or not name.isprintable():
        raise ValueError("a file name that can be printed, without .. or a leading /")
    return name


def check_region(value: Any) -> Any:
    """Check the form of a region: polygons, or run lengths."""
    if isinstance(value, dict):
        size, counts = value.get("size"), value.get("counts")
        # type() instead of isinstance, for which True is an int.
        is_list = isinstance(counts, list) and all(type(count) is int and 0 <= count < 1 << 31 for count in counts)
        is_good = isinstance(size, list) and len(size) == 2 and (is_list or isinstance(counts, str))
    else:
        is_good = isinstance(value, list) and bool(value) and all(map(_is_outline, value))
    if not is_good:
        raise ValueError("polygons of at least three points, of finite numbers, or run lengths with size and counts")
    return value


def _is_outline(value: Any) -> bool:
    numbers = isinstance(value, list) and len(value) >= 6 and all(type(each) in (int, float) for each in value)
    return numbers and all(-1e15 < each < 1e15 for each in value)


def _in_file(value: int, info: ValidationInfo) -> int:
    if value not in info.context[info.field_name]:  # type: ignore[index]  # `check_entries` gives both
        kind = "images" if info.field_name == "image_id" else "categories"
        raise ValueError(f"the id of one of the file's {kind}")
    return value


Id = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Reference = Annotated[Id, AfterValidator(_in_file)]  #: The id of an image or a category that `check_entries` is given.
Number = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST)]
Size = Annotated[float, Field(strict=True, ge=0, le=LARGEST)]
Side = Annotated[int, Field(strict=True, ge=1, le=MAX_PIXELS)]
FileName = Annotated[str, Field(strict=True), AfterValidator(_inside)]
IsCrowd = Annotated[int, Field(strict=True, ge=0, le=1)] | None
Region = Annotated[Any, PlainValidator(check_region)]


class ImageEntry(BaseModel):
    """An image of the file."""

    id: Id
    file_name: FileName
    width: Side
    height: Side
    crowdIndex: Number | None = None  # CrowdPose: the share of overlapping people


class RegionEntry(BaseModel):
    """An annotation with a region."""

    id: Id
    image_id: Reference
    category_id: Reference
    iscrowd: IsCrowd = None
    segmentation: Region


def read_coco(path: Path) -> dict[str, list[Any]]:
    """Read the lists of an annotation file; only the images are checked.

    Raises:
        DataError: It can't be read, is not an annotation file, or an image is wrong.
    """
    try:
        with without_collections():  # up to a hundred million new objects
            content = parse_json(read_plain(path, MAX_JSON_BYTES))
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror or error}", allowed=_EXPECTED, fix="Make it readable."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", allowed=_EXPECTED, fix="Download it again.") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} contains a {type(content).__name__}, not annotations", allowed=_EXPECTED, fix="Use another file."
        )
    for part in _PARTS:
        if not isinstance(content.get(part), list):
            raise DataError(
                f"{path} has no list of {part}",
                given=f"its parts: {', '.join(content) or 'none'}",
                allowed=_EXPECTED,
                fix="Use an annotation file: not one of results, or of images without annotations.",
            )
    images = check_entries(content["images"], ImageEntry, "images", path)
    for image in images:
        if image["width"] * image["height"] > MAX_PIXELS:
            raise DataError(
                f"image {image['id']} is {image['width']}x{image['height']} by its annotation",
                where=path,
                allowed=f"at most {MAX_PIXELS:,} pixels",
                fix="Correct the width and the height, or remove the image.",
            )
    return {**{part: content[part] for part in _PARTS}, "images": images}


def check_entries(
    entries: Sequence[Any],
    kind: type[BaseModel],
    part: str,
    path: Path,
    *,
    places: Sequence[int] | None = None,
    known: Mapping[str, Any] | None = None,
    unique: bool = True,
) -> list[dict[str, Any]]:
    """Check entries of a file, and return them without fields that are not used.

    Args:
        part: The list of the file, such as "annotations".
        places: Index of each entry in the list of the file. None: the entries are the whole list.
        known: The ids that each `Reference` may be, by the field's name.
    """
    try:
        with without_collections():
            adapter = TypeAdapter(list[kind])  # type: ignore[valid-type]
            checked: list[BaseModel] = adapter.validate_python(entries, context=known)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place, *fields = first["loc"]
        where = f"{part}[{place if places is None else places[int(place)]}]"
        expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if not fields:
            raise DataError(f"{where} of {path} is {shown(first['input'])}", allowed="an object", fix=_FIX) from None
        name = "".join(f"[{field}]" if isinstance(field, int) else f".{field}" for field in fields).removeprefix(".")
        value = ... if first["type"] == "missing" else first["input"]
        raise wrong(entries[int(place)], name, f"{path}: {where}", expected, value) from None
    found = [dict(entry) for entry in checked]
    seen: dict[int, int] = {}
    for index, entry in enumerate(found if unique else ()):
        if seen.setdefault(entry["id"], index) != index:
            first_at, again_at = (at if places is None else places[at] for at in (seen[entry["id"]], index))
            raise DataError(
                f"id {entry['id']} comes twice in {part}",
                where=f"{path}: {part}[{first_at}] and {part}[{again_at}]",
                allowed="a number that no other entry has",
                fix="Give each entry a unique id.",
            )
    return found


def wrong(entry: Mapping[str, Any], field: str, where: str, expected: str, value: Any = ...) -> DataError:
    """Make the error of a field such as `keypoints[3]` in `a.json: annotations[7]`; the value `...`: it is missing."""
    part, _, place = where.rpartition(": ")[2].partition("[")
    number = entry.get("id")
    is_id = type(number) is int and abs(number) < 2**64
    name = f"{_PARTS[part]} {number if is_id else f'number {place[:-1]}'}"
    if value is ...:
        return DataError(f"{name} has no {field}", where=where, allowed=expected, fix=_FIX)
    return DataError(f"{field} of {name} is {shown(value)}", where=f"{where}.{field}", allowed=expected, fix=_FIX)


def index_coco(content: Mapping[str, list[Any]]) -> COCO:
    """Make faster_coco_eval's index of checked lists."""
    with warnings.catch_warnings():
        # COCO warns of id 0, which its evaluation takes for no match; the pose metric replaces ids there.
        warnings.simplefilter("ignore", UserWarning)
        return COCO(dict(content))


def shown(value: Any) -> str:
    """Format a value of the file as JSON, shortened."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "lists or objects that are nested too deeply"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
