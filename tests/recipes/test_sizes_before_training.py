"""Images whose sizes can't be trained or evaluated on are named when the data is opened, before the first step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samebits.data.images import looked_at
from samebits.errors import DataError
from samebits.recipes.pose.coco_files import open_files
from samebits.recipes.pose.config import DataConfig as PoseData
from samebits.recipes.segment.config import DataConfig, MakeConfig
from samebits.recipes.segment.listing import list_images, open_source
from samebits.recipes.segment.make import make
from tests.recipes.coco_regions import write_coco
from tests.synthetic_people import describe, draw_synthetic_image


def people(root: Path) -> Callable[[], Any]:
    """Two images of people in COCO's format; opening them for training and evaluation."""
    (root / "images/val2017").mkdir(parents=True)
    images, entries = [], []
    for number in (1, 2):
        drawing = draw_synthetic_image(64, number)
        truth = describe(drawing, number)
        Image.fromarray(drawing.rgb).save(root / "images/val2017" / f"{number}.jpg")
        images.append({"id": number, "file_name": f"{number}.jpg", "width": 64, "height": 64})
        entries += truth["annotations"]
    content = {"images": images, "annotations": entries, "categories": [{"id": 1, "name": "person"}]}
    (root / "annotations").mkdir()
    (root / "annotations/person_keypoints_val2017.json").write_text(json.dumps(content))
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


PLACES = {"pose": (people, "images/val2017/2.jpg"), "segment": (regions, "images/0003.jpg"),
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
    with_a_long_header(tmp_path / "images/val2017/2.jpg")
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
    Image.new("RGB", (990, 30)).save(tmp_path / "images/val2017/2.jpg")
    assert len(open_files(PoseData(root=tmp_path, train="val2017"), train=True)) == 1
    with pytest.raises(DataError, match="image 2 is 990x30, too long for pose estimation"):
        open_files(PoseData(root=tmp_path), train=False)


@pytest.mark.parametrize("num", [0, 1, 999, 1000, 1001, 118_287])
def test_of_many_images_a_thousand_are_looked_at(num: int) -> None:
    chosen = looked_at([str(number) for number in range(num)])
    assert len(chosen) <= 1000
    assert len(chosen) >= min(num, 500)
