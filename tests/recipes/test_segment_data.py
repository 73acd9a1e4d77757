"""Masks and COCO files of the segment recipe: what is read, and what is refused with its place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samebits.data.images import looked_at
from samebits.data.keyed import keys
from samebits.errors import DataError
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.pose.coco_files import open_files
from samebits.recipes.pose.config import DataConfig as PoseData
from samebits.recipes.segment.config import DataConfig, MakeConfig
from samebits.recipes.segment.data import LabeledImages
from samebits.recipes.segment.listing import list_images, open_source
from samebits.recipes.segment.make import make
from tests.recipes.coco_regions import write_coco
from tests.synthetic_people import write_coco as write_people


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Ten synthetic images with masks and as a COCO file."""
    make(MakeConfig(num_images=10, size_px=48), tmp_path / "made")
    write_coco(tmp_path / "made")
    return tmp_path / "made"


def opened(root: Path, *, train: bool = True, **settings: Any) -> tuple[dict[str, Any], LabeledImages]:
    config = DataConfig(root=root, size_px=(32, 64), **settings)
    info = json.loads(json.dumps(list_images(config, 0)))
    return info, LabeledImages(open_source(config, info, train=train), config, train=train)


def read_all(root: Path, **settings: Any) -> None:
    for train in (True, False):
        _, samples = opened(root, train=train, **settings)
        indices = np.arange(len(samples))
        samples.batch(indices, keys(0, 0, indices))


def save_mask(root: Path, name: str, values: Any, **options: Any) -> None:
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    mask = np.asarray(values)
    Image.fromarray(mask).save(root / "masks" / f"{name}.png", **options)
    Image.new("RGB", mask.shape[1::-1]).save(root / "images" / f"{name}.jpg")


def test_masks_and_a_coco_file_give_the_same_labels(made: Path) -> None:
    info, from_masks = opened(made, train=False)
    assert (info["classes"], info["values"]) == (["0", "1", "2", "3"], [0, 1, 2, 3])
    assert (len(info["train"]), len(info["held_out"])) == (8, 2)
    coco_info, from_coco = opened(made / "coco.json", train=False)
    assert coco_info["classes"] == ["background", "circles", "squares", "triangles"]
    config = DataConfig(root=made, eval=made / "coco.json")
    with pytest.raises(DataError, match="a folder and a COCO file"):
        list_images(config, 0)
    indices = np.arange(2)
    batches = [samples.batch(indices, keys(0, 0, indices)) for samples in (from_masks, from_coco)]
    names = [{samples.source.names[index][-8:-4] for index in range(2)} for samples in (from_coco,)]
    assert names[0] <= {f"{number:04}" for number in range(10)}
    everything = opened(made / "coco.json", train=True)[1].source, from_coco.source
    by_name = {s.names[i][7:11]: s.read(i, 0)[1] for s in everything for i in range(len(s.names))}
    for index in range(2):
        np.testing.assert_array_equal(by_name[from_masks.source.names[index]], from_masks.source.read(index, 0)[1])
    assert batches[0].inputs.shape == (2, 32, 64, 3)
    assert batches[0].targets["masks"][0].shape == (48, 48)
    assert len(from_masks.files or ()) == 4


def test_a_crop_cuts_image_and_labels_at_the_same_place(made: Path) -> None:
    class Striped:
        files = None

        def __len__(self) -> int:
            return 6

        def name(self, index: int) -> str:
            return ""

        def read(self, index: int, key: int) -> Any:
            labels = np.repeat(np.arange(0, 250, 5, dtype=np.uint8)[None], 40, 0).repeat(4, axis=1)
            return np.stack([labels] * 3, axis=2), labels

    samples = LabeledImages(Striped(), DataConfig(size_px=(64, 96), crop_area=(0.2, 0.9)), train=True)
    indices = np.arange(6)
    batch = samples.batch(indices, keys(0, 3, indices))
    assert len({int(labels[0, 0]) for labels in batch.targets["labels"]}) > 2
    directions = set()
    for image, labels in zip(batch.inputs[..., 0].int(), batch.targets["labels"].int(), strict=True):
        assert (image - labels).abs().max() <= 5  # smoothed by less than a stripe
        directions.add(bool(labels[0, 0] < labels[0, -1]))
    assert directions == {True, False}
    assert torch.equal(samples.batch(indices[2:4], keys(0, 3, indices[2:4])).inputs, batch.inputs[2:4])


@pytest.mark.parametrize(
    ("values", "settings", "classes", "labels"),
    [
        ([[0, 255]], {}, ["0", "255"], [0, 1]),
        ([[0, 255]], {"classes": ("sky", "road")}, ["sky", "road"], [0, 1]),
        ([[0, 7, 255]], {}, ["0", "7"], [0, 1, IGNORED]),
        ([[3, 1, 9]], {"values": (9, 3), "ignore_label": 1}, ["9", "3"], [1, IGNORED, 0]),
        ([[0, 1]], {"classes": ("a", "b", "c")}, ["a", "b", "c"], [0, 1]),
    ],
)
def test_values_of_masks_become_classes(
    tmp_path: Path, values: Any, settings: dict[str, Any], classes: list[str], labels: list[int]
) -> None:
    for name in ("a", "b"):
        save_mask(tmp_path, name, np.array(values, np.uint8))
    info, samples = opened(tmp_path, **settings)
    assert info["classes"] == classes
    assert samples.source.read(0, 0)[1].tolist() == [labels]


def test_palette_and_16_bit_masks_with_a_suffix_in_named_folders_are_read(tmp_path: Path) -> None:
    save_mask(tmp_path, "a_seg", np.array([[0, 300]], np.uint16))
    mask = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    mask.putpalette([9, 9, 9, 200, 0, 0])
    (tmp_path / "images" / "a_seg.jpg").rename(tmp_path / "images" / "a.jpg")
    mask.save(tmp_path / "masks" / "b_seg.png")
    Image.new("RGB", (2, 1)).save(tmp_path / "images" / "b.png")
    Image.new("RGB", (2, 1)).save(tmp_path / "images" / "c.png")
    (tmp_path / "masks").rename(tmp_path / "labels")
    info, samples = opened(tmp_path, mask_folder="labels", mask_suffix="_seg")
    assert (info["values"], info["num_without_mask"], len(samples)) == ([0, 1, 300], 1, 1)


BAD_MASKS: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "colors": (lambda r: save_mask(r, "b", np.zeros((2, 2, 3), np.uint8)), {}, "b.png has colors, not classes"),
    "lossy": (lambda r: (r / "masks/b.png").rename(r / "masks/b.jpg"), {}, "b.jpg has a lossy format"),
    "no image": (lambda r: (r / "images/b.jpg").unlink(), {}, "b.png has no image"),
    "twice": (lambda r: Image.new("L", (2, 2)).save(r / "masks/b.tif"), {}, "has two files for b"),
    "damaged": (lambda r: (r / "masks/b.png").write_bytes(b"\x89PNG"), {}, "b.png"),
    "one class": (lambda r: None, {"values": None}, "have only one class"),
    "names": (
        lambda r: save_mask(r, "b", np.array([[0, 9], [0, 9]], np.uint8)),
        {"classes": ("a", "b", "c")},
        "have other values than data.classes, which names 3 classes",
    ),
    "no folder": (lambda r: None, {"mask_folder": "labels"}, "has no folder labels"),
    "no masks": (lambda r: None, {"mask_suffix": "_x"}, "contains no masks"),
    "unknown value": (
        lambda r: save_mask(r, "b", np.array([[0, 1], [1, 7]], np.uint8)), {"values": (0, 1)},
        "b.png has the value 7, which is no class",
    ),
    "size": (
        lambda r: Image.new("RGB", (3, 2)).save(r / "images/b.jpg"), {"values": (0, 1)},
        "b.png is 2x2, but its image is 3x2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MASKS)
def test_a_mask_that_can_not_be_used_is_named(case: str, tmp_path: Path) -> None:
    spoil, settings, problem = BAD_MASKS[case]
    for name in ("a", "b"):
        save_mask(tmp_path, name, np.zeros((2, 2), np.uint8))
    spoil(tmp_path)
    with pytest.raises(DataError) as caught:
        read_all(tmp_path, **settings)
    assert problem in caught.value.what
    assert caught.value.slots["fix"]


def test_crowds_and_shared_pixels_are_ignored_and_other_categories_are_background(tmp_path: Path) -> None:
    def box(x: int, y: int, side: int) -> list[list[int]]:
        return [[x, y, x + side, y, x + side, y + side, x, y + side]]

    entries = [(1, box(0, 0, 8), 0), (2, box(4, 0, 8), 0), (3, box(0, 10, 4), 0), (1, box(10, 10, 4), 1)]
    content = {
        "images": [{"id": 4, "file_name": "a.png", "width": 16, "height": 16}],
        "annotations": [
            {"id": n, "image_id": 4, "category_id": category, "segmentation": region, "iscrowd": crowd}
            for n, (category, region, crowd) in enumerate(entries)
        ],
        "categories": [{"id": 3, "name": "tree"}, {"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
    }
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    config = DataConfig(train=path, eval=path, classes=("dog", "cat"))
    info = list_images(config, 0)
    assert info["classes"] == ["background", "dog", "cat"]
    _, labels = open_source(config, info, train=True).read(0, 0)
    found = {place: int(labels[place]) for place in ((2, 2), (2, 5), (2, 10), (11, 2), (11, 11), (15, 0))}
    assert list(found.values()) == [2, IGNORED, 1, 0, IGNORED, 0]


BAD_FIELDS: dict[str, tuple[list[Any], Any, str]] = {
    "category": (["annotations", 0, "category_id"], 9, "category_id of annotation 1 is 9"),
    "region": (["annotations", 0, "segmentation"], [[1, 2]], "segmentation of annotation 1 is [[1, 2]]"),
    "no region": (["annotations", 0, "segmentation"], [], "segmentation of annotation 1 is []"),
    "class": (["categories", 0, "name"], "a\nb", "name of category 1 is"),
    "runs": (["annotations", 0, "segmentation"], {"size": [9, 9], "counts": [81]}, "the region of annotation 1 does"),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_wrong_field_of_a_coco_file_is_named(case: str, made: Path) -> None:
    (part, place, field), value, problem = BAD_FIELDS[case]
    path = made / "coco.json"
    content = json.loads(path.read_text())
    content[part][place][field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        read_all(path)
    assert problem in caught.value.what


def people(root: Path) -> Callable[[], Any]:
    """Two images of people in COCO's format; opening them for training and evaluation."""
    write_people(root, 0, 2, 64)
    config = PoseData(root=root, train="val2017")
    return lambda: [open_files(config, train=train) for train in (True, False)]


def regions(root: Path, **settings: Any) -> Callable[[], Any]:
    """Ten images with regions in COCO's format, or with masks if `values` of them are set."""
    make(MakeConfig(num_images=10, size_px=48), root)
    write_coco(root)
    config = DataConfig(root=root if "values" in settings else root / "coco.json", **settings)
    info = list_images(config, 0)
    return lambda: [open_source(config, info, train=train) for train in (True, False)]


def masks(root: Path) -> Callable[[], Any]:
    return regions(root, values=(0, 1, 2, 3))


def smaller(image: Path) -> None:
    Image.open(image).reduce(2).save(image)


def wider(image: Path) -> None:
    opened = Image.open(image)
    opened.resize((opened.width + 8, opened.height)).save(image)


def with_a_long_header(image: Path) -> None:
    """Smaller, and with a header longer than the part of a file that is read."""
    opened = Image.open(image).reduce(2)
    opened.save(image, icc_profile=bytes(60_000), comment=bytes(60_000))


PLACES = {"pose": (people, "images/val2017/000000000002.jpg"), "segment": (regions, "images/0003.jpg"),
          "masks": (masks, "images/0003.jpg"), "images of masks": (masks, "masks/0003.png")}  # fmt: skip


@pytest.mark.parametrize("change", [smaller, wider])
@pytest.mark.parametrize("place", PLACES)
def test_an_image_of_another_size_is_named_before_training(
    place: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    prepare, image = PLACES[place]
    open_all = prepare(tmp_path / "data")
    open_all()
    change(tmp_path / "data" / image)
    with pytest.raises(DataError, match=f"{Path(image).stem}.* is [0-9]+x[0-9]+, but") as caught:
        open_all()
    assert caught.value.slots["fix"]


def test_an_image_whose_header_is_too_long_is_named_when_it_is_read(tmp_path: Path) -> None:
    open_all = people(tmp_path)
    with_a_long_header(tmp_path / "images/val2017/000000000002.jpg")
    source = open_all()[1]
    with pytest.raises(DataError, match=r"2\.jpg is 32x32, but 64x64 in its annotation"):
        source.example(1, 0)


def test_an_image_that_is_too_long_for_pose_estimation_is_named_before_the_first_evaluation(tmp_path: Path) -> None:
    people(tmp_path)
    path = tmp_path / "annotations/person_keypoints_val2017.json"
    content = json.loads(path.read_text())
    content["images"][1] |= {"width": 990, "height": 30}
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] == 1]
    path.write_text(json.dumps(content))
    Image.new("RGB", (990, 30)).save(tmp_path / "images/val2017/000000000002.jpg")
    assert len(open_files(PoseData(root=tmp_path, train="val2017"), train=True)) == 1
    with pytest.raises(DataError, match="image 2 is 990x30, too long for pose estimation"):
        open_files(PoseData(root=tmp_path), train=False)


@pytest.mark.parametrize("num", [0, 1, 999, 1000, 1001, 118_287])
def test_of_many_images_a_thousand_are_looked_at(num: int) -> None:
    chosen = looked_at([str(number) for number in range(num)])
    assert len(chosen) <= 1000
    assert len(chosen) >= min(num, 500)
