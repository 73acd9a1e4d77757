"""Datasets in COCO's format: annotation files of strangers, regions as masks, and images in a folder."""

import json
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import numpy as np
from faster_coco_eval import COCO
from faster_coco_eval.core import mask as coco_mask
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)

from samebits.data.images import (
    MAX_PIXELS,
    ByteArray,
    EncodedImage,
    looked_at,
    read_head,
    stored_size,
)
from samebits.errors import DataError, cannot_read
from samebits.host_memory import without_collections
from samebits.plain_file import parse_json, read_plain

# Read an untrusted annotation file in COCO's format. A wrong field is named with its place in the file.


# No image has so many pixels, and the square of this is still a number: what is larger is a slip.
LARGEST = 1e9
MAX_JSON_BYTES = 1 << 31  # COCO's largest file of annotations has 450 MB
_SHOWN = 60
FIX = "Correct the annotation file."
_EXPECTED = "a JSON file with images, annotations and categories"
_PARTS = {"images": "image", "annotations": "annotation", "categories": "category"}


def _inside(name: str) -> str:
    name = name.replace("\\", "/")  # as tools on Windows write it
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or not name.isprintable():
        raise ValueError("a file name that can be printed, without .. or a leading /")
    return name


_Outline = Annotated[
    list[Annotated[float, Field(strict=True, gt=-1e15, lt=1e15)]], Field(strict=True, min_length=6)
]
_Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]


class _Runs(BaseModel):
    size: Annotated[list[Any], Field(strict=True, min_length=2, max_length=2)]
    counts: Annotated[list[_Count], Field(strict=True)] | Annotated[str, Field(strict=True)]


_REGION = TypeAdapter[Any](Annotated[list[_Outline], Field(strict=True, min_length=1)] | _Runs)


def check_region(value: Any) -> Any:
    """Check the form of a region: polygons, or run lengths."""
    try:
        _REGION.validate_python(value)
    except ValidationError:
        raise ValueError(
            "polygons of at least three points, of finite numbers, or run lengths with size and counts"
        ) from None
    return value


def _in_file(value: int, info: ValidationInfo) -> int:
    if value not in info.context[info.field_name]:  # type: ignore[index]  # `check_entries` gives both
        kind = "images" if info.field_name == "image_id" else "categories"
        raise ValueError(f"the id of one of the file's {kind}")
    return value


Id = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
#: The id of an image or a category that `check_entries` is given.
Reference = Annotated[Id, AfterValidator(_in_file)]
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
        raise cannot_read(DataError, path, error, "Make it readable.", allowed=_EXPECTED) from error
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON: {error}", allowed=_EXPECTED, fix="Download it again."
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path} contains a {type(content).__name__}, not annotations",
            allowed=_EXPECTED,
            fix="Use another file.",
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
    known: Mapping[str, Any] | None = None,
    leave_out: Collection[Any] = (),
    unique: bool = True,
) -> list[dict[str, Any]]:
    """Check entries of a file, and return them without fields that are not used.

    Args:
        part: The list of the file, such as "annotations".
        known: The ids that each `Reference` may be, by the field's name.
        leave_out: Ids of categories whose entries are neither checked nor returned.
    """
    found = []
    places: dict[int, int] = {}
    with without_collections():
        for place, entry in enumerate(entries):
            if isinstance(entry, dict) and entry.get("category_id") in leave_out:
                continue
            try:
                checked = dict(kind.model_validate(entry, context=known))
            except ValidationError as error:
                raise _wrong(entry, part, place, path, error) from None
            first = places.setdefault(checked["id"], place)
            if unique and first != place:
                raise DataError(
                    f"id {checked['id']} comes twice in {part}",
                    where=f"{path}: {part}[{first}] and {part}[{place}]",
                    allowed="a number that no other entry has",
                    fix="Give each entry a unique id.",
                )
            found.append(checked)
    return found


def _wrong(entry: Any, part: str, place: int, path: Path, error: ValidationError) -> DataError:
    """Make the error of the first wrong field of an entry, such as `keypoints[3]` in `a.json: annotations[7]`."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = f"{part}[{place}]"
    if not first["loc"]:
        return DataError(f"{where} of {path} is {shown(entry)}", allowed="an object", fix=FIX)
    field = "".join(
        f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"]
    ).removeprefix(".")
    number = entry.get("id")
    is_id = type(number) is int and abs(number) < 2**64
    name = f"{_PARTS[part]} {number if is_id else f'number {place}'}"
    is_missing = first["type"] == "missing"
    return DataError(
        f"{name} has no {field}" if is_missing else f"{field} of {name} is {shown(first['input'])}",
        where=f"{path}: {where}" + ("" if is_missing else f".{field}"),
        allowed=first["msg"].removeprefix("Value error, ").removeprefix("Input should be "),
        fix=FIX,
    )


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


# Draw regions of COCO's annotations into masks, within a limit on the length of their outlines.


# COCO's encoder follows outlines point by point, also outside of an image, and takes some 200 bytes for a pixel.
MAX_OUTLINE_PX = 1_000_000
MAX_OUTLINES_PX = 10_000_000  # of all regions of an image


def draw_regions(coco: COCO, annotations: Iterable[Mapping[str, Any]], image_id: int) -> ByteArray:
    """Draw regions of an image into one mask (H, W) of 0 and 1; an annotation without a region is drawn as its box.

    Raises:
        DataError: A region has another form, or does not fit the image.
    """
    image = coco.imgs[image_id]
    height = image["height"]
    width = image["width"]
    left_px = MAX_OUTLINES_PX
    runs = []
    for annotation in annotations:
        region: Any = annotation.get("segmentation")
        if not region and "bbox" in annotation:
            left, top, width_px, height_px = annotation["bbox"]
            right = left + width_px
            bottom = top + height_px
            region = [[left, top, right, top, right, bottom, left, bottom]]
        try:
            check_region(region)
            if isinstance(region, dict):
                _check_runs(region, height, width)
            else:
                left_px -= _outline_px(region, height, width)
                if left_px < 0:
                    raise ValueError(
                        f"with those before it, its outline is longer than {MAX_OUTLINES_PX:,} pixels"
                    )
            runs.append(coco.annToRLE({"image_id": image_id, "segmentation": region}))
            if isinstance(region, dict):
                coco_mask.decode(runs[-1])  # raises if its text stands for another number of pixels
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"the region of annotation {annotation['id']} does not fit its image",
                where=f"image {image_id}, {width}x{height}",
                cause=error,
                fix="Correct the annotation file.",
            ) from error
    if not runs:
        return np.zeros((height, width), np.uint8)
    return np.ascontiguousarray(coco_mask.decode(coco_mask.merge(runs)), dtype=np.uint8)


def _check_runs(region: Mapping[str, Any], height: int, width: int) -> None:
    if list(region["size"]) != [height, width]:
        raise ValueError(f"its run lengths are of {region['size'][1]}x{region['size'][0]}")
    counts = region["counts"]
    if isinstance(counts, str):
        if not counts.isascii():
            raise ValueError("its run lengths are not COCO's text")
    elif sum(counts) != height * width:
        raise ValueError(f"its run lengths add up to {sum(counts):,}, not {width * height:,}")


def _outline_px(outlines: list[list[float]], height: int, width: int) -> int:
    """Return the number of pixels on closed outlines."""
    total = 0.0
    for outline in outlines:
        points = np.array(outline[: len(outline) // 2 * 2], np.float64).reshape(-1, 2)
        if np.abs(points).max() > 100 * max(width, height):
            raise ValueError("it lies far outside of it")
        total += float(np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum())
    if total > MAX_OUTLINE_PX:
        raise ValueError(f"its outline is longer than {MAX_OUTLINE_PX:,} pixels")
    return int(total)


# Read the images of a dataset from a folder.


class Folder:
    """Images in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check_sizes(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Compare the (width, height) of up to a thousand images with their annotations, from their headers alone.

        Raises:
            DataError: An image has another size, is missing or can't be read.
        """
        for name in looked_at(list(sizes)):
            if stored_size(read_head(self.path / name)) not in (None, sizes[name]):
                self.pixels(name, sizes[name])  # its error names the cause

    def pixels(self, name: str, size: tuple[int, int]) -> ByteArray:
        """Decode an image of (width, height) to (H, W, 3) RGB bytes as stored: annotations ignore the EXIF orientation.

        Raises:
            DataError: It is no image, is damaged, or has another size.
        """
        path = f"{self.path}/{name}"
        image = EncodedImage(path, upright=False)
        if image.size == size:
            return image.pixels()
        cause = None
        fix = "Use images and annotations from the same source."
        if image.size == size[::-1]:
            cause = "the annotation has width and height swapped"
            if EncodedImage(path).size == size:
                cause = "it was annotated after its EXIF rotation, which is not applied here"
                fix = "Apply the EXIF orientation to the image (mogrify -auto-orient)."
        raise DataError(
            f"the image {path} is {image.size[0]}x{image.size[1]}, but {size[0]}x{size[1]} in its annotation",
            cause=cause,
            fix=fix,
        )


def open_folder(candidates: Sequence[Path], names: Sequence[str], fix: str) -> Folder:
    """Open the first folder of images that exists; `fix`: what the user can do if some are missing, a sentence.

    Raises:
        DataError: None of them exists, or images are missing.
    """
    path = next((path for path in candidates if path.is_dir()), None)
    if path is None:
        packed = next((path for path in candidates if path.with_suffix(".zip").is_file()), None)
        raise DataError(
            "there is no folder of images",
            given=None if packed is None else f"{packed.with_suffix('.zip')}, which is not read",
            allowed="\n".join(str(path.with_suffix("")) for path in candidates),
            fix=f"Unpack the images into {'this folder' if packed is None else packed.with_suffix('')}.",
        )
    # List each folder once: a hundred thousand stat calls would take long on a file server.
    known: set[str] = set()
    for inner in {str(PurePosixPath(name).parent) for name in names}:
        with suppress(OSError), os.scandir(path / inner) as entries:
            known.update(str(PurePosixPath(inner) / entry.name) for entry in entries)
    missing = [name for name in names if str(PurePosixPath(name)) not in known]
    if missing:
        more = f" … and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        raise DataError(
            f"{len(missing):,} of {len(names):,} images are missing in {path}",
            given="\n".join(missing[:3]) + more,
            fix=fix,
        )
    return Folder(path)
