"""Faults of annotation files and images, and their errors."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

from samebits.data.keyed import keys
from samebits.errors import DataError
from samebits.recipes.pose.coco_files import open_files
from samebits.recipes.pose.config import DataConfig
from samebits.recipes.pose.data import EvalImages, TrainImages
from samebits.recipes.pose.skeletons import COCO
from tests.recipes.pose_faults import FAULTS
from tests.synthetic_people import describe, draw_synthetic_image


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A dataset of two synthetic images in COCO's format."""
    images, people = [], []
    (tmp_path / "images/val2017").mkdir(parents=True)
    for number in (1, 2):
        drawing = draw_synthetic_image(64, number)
        truth = describe(drawing, number)
        Image.fromarray(drawing.rgb).save(tmp_path / "images/val2017" / truth["file_name"])
        images.append({"id": number, "file_name": truth["file_name"], "width": 64, "height": 64})
        people.extend(truth["annotations"])
    category = {"id": 1, "name": "person", "keypoints": list(COCO.joints)}
    content = {"images": images, "annotations": people, "categories": [category]}
    _annotations(tmp_path).parent.mkdir()
    _annotations(tmp_path).write_text(json.dumps(content))
    return tmp_path


def _annotations(root: Path) -> Path:
    return root / "annotations/person_keypoints_val2017.json"


def _open(root: Path, name: str = "coco") -> Any:
    return open_files(DataConfig(name=name, root=root), train=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_annotation_file_that_is_not_what_it_claims_is_explained(small: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    content = json.loads(_annotations(small).read_text())
    change(content)
    _annotations(small).write_text(json.dumps(content))
    with pytest.raises(DataError) as error:
        _open(small)
    assert re.search(said, str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), ("[]", "contains a list"), ("\x00\x01", "is not JSON")]
)
def test_a_file_that_is_no_annotation_file_is_named(small: Path, text: str, said: str) -> None:
    _annotations(small).write_text(text)
    with pytest.raises(DataError, match=said):
        _open(small)


def test_a_file_without_what_a_split_is_made_of_is_named(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    _annotations(small).write_text(json.dumps(content | {"annotations": []}))
    with pytest.raises(DataError, match=r"split val2017 of coco has no image with people(.|\n)*val2017\.json"):
        open_files(DataConfig(name="coco", root=small, train="val2017"), train=True)


def test_training_needs_no_areas(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    for entry in content["annotations"]:
        del entry["area"]
    _annotations(small).write_text(json.dumps(content))
    assert len(open_files(DataConfig(name="coco", root=small, train="val2017"), train=True)) == 2


def test_names_may_begin_at_their_folder(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    for image in content["images"]:
        image["file_name"] = f"./{image['file_name']}"
    _annotations(small).write_text(json.dumps(content))
    folder = EvalImages(_open(small)).rgb(0)
    for image in content["images"]:
        image["file_name"] = image["file_name"].removeprefix("./")
    _annotations(small).write_text(json.dumps(content))
    assert np.array_equal(EvalImages(_open(small)).rgb(0), folder)


def test_crowdposes_missing_split_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    config = DataConfig(name="crowdpose", root=tmp_path)
    with pytest.raises(DataError, match="no annotations of split trainval of crowdpose"):
        open_files(config, train=True)
    (tmp_path / "json").mkdir()
    (tmp_path / "json/crowdpose_train.json").write_text("{}")
    with pytest.raises(DataError, match=r"crowdpose_train\.json has no list of images"):
        open_files(config, train=True)


def test_a_split_that_is_not_there_is_named_with_those_that_are(small: Path) -> None:
    with pytest.raises(DataError, match="no annotations of split nowhere") as error:
        open_files(DataConfig(name="coco", root=small, eval="nowhere"), train=False)
    assert "person_keypoints_val2017.json" in str(error.value)
    with pytest.raises(DataError, match="is not a folder"):
        _open(small / "other")


def test_a_picture_of_another_size_than_annotated_is_refused(small: Path) -> None:
    path = next((small / "images/val2017").glob("*.jpg"))
    Image.new("RGB", (80, 64)).save(path)
    with pytest.raises(DataError, match=r"80x64, but 64x64 in its annotation") as error:
        EvalImages(_open(small)).rgb(0 if path.stem.endswith("1") else 1)
    assert str(path) in str(error.value)
    assert "EXIF" not in str(error.value)


def test_a_picture_that_was_annotated_as_exif_turns_it_is_explained(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    content["images"][0].update(width=48)
    _annotations(small).write_text(json.dumps(content))
    path, exif = small / "images/val2017" / content["images"][0]["file_name"], Image.Exif()
    for orientation, cause in ((6, "EXIF rotation"), (1, "width and height swapped"), (3, "width and height swapped")):
        exif[0x0112] = orientation
        Image.new("RGB", (64, 48)).save(path, exif=exif)
        with pytest.raises(DataError, match=r"64x48, but 48x64 in its annotation") as caught:
            EvalImages(_open(small)).rgb(0)
        assert cause in caught.value.slots["cause"]


def test_an_image_is_read_as_stored_whatever_its_exif_orientation(small: Path) -> None:
    path = small / "images/val2017/000000000001.jpg"
    upright = Image.open(path)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upright.save(path, exif=exif, quality=100)
    stored = np.asarray(Image.open(path))
    assert np.array_equal(EvalImages(_open(small)).rgb(0), stored)


def test_crowds_and_people_without_keypoints_are_not_trained_on(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    empty = {"image_id": 1, "category_id": 1, "keypoints": [0] * 51, "num_keypoints": 0, "area": 9.0}
    inside = [64 * 20, 64 * 4, 64 * 40]  # column by column: four columns from the 20th
    content["annotations"] += [
        {**empty, "id": 1, "iscrowd": 1, "bbox": [20, 0, 4, 64], "segmentation": {"size": [64, 64], "counts": inside}},
        {**empty, "id": 2, "iscrowd": 0, "bbox": [40, 10, 8, 8], "segmentation": [[40, 10, 48, 10, 48, 18, 40, 18]]},
        {**empty, "id": 3, "iscrowd": 0, "bbox": [2, 50, 5, 5]},
    ]
    stripes = [64 * 60, *[1] * 254, 2]  # more runs than fit a byte: the last four columns, row by row, from outside
    content["annotations"].append(
        {**empty, "id": 4, "iscrowd": 1, "bbox": [60, 0, 4, 64], "segmentation": {"size": [64, 64], "counts": stripes}}
    )
    packed = np.zeros((64, 64), np.uint8, order="F")
    packed[30:33, 50:57] = 1
    region = {"size": [64, 64], "counts": coco_mask.encode(packed)["counts"].decode()}
    content["annotations"].append({**empty, "id": 5, "iscrowd": 1, "bbox": [50, 30, 7, 3], "segmentation": region})
    _annotations(small).write_text(json.dumps(content))
    example = _open(small).example(0, 0)
    expected = np.full((64, 64), 255)
    expected[::2, 60:] = 0
    expected[-1, -1] = 0
    expected[:, 20:24] = 0
    expected[10:18, 40:48] = 0
    expected[50:55, 2:7] = 0
    expected[30:33, 50:57] = 0
    assert np.array_equal(example.mask, expected)
    num_people = len([entry for entry in content["annotations"] if entry["image_id"] == 1 and not entry["iscrowd"]])
    assert len(example.joints) == num_people


@pytest.mark.parametrize(
    ("region", "said"),
    [
        ({"size": [64, 80], "counts": [64 * 80]}, "80x64"),
        ({"size": [64, 64], "counts": [10, 20]}, "add up to 30"),
        ({"size": [64, 64], "counts": "zz"}, "decoded 20 pixels"),
        ({"size": [64, 64], "counts": "a" * 99}, "malformed"),
        ({"size": [64, 64], "counts": "é\ud800"}, "not COCO's text"),
        ([[0, 0, 1e12, 0, 5, 5]], "far outside"),
    ],
)
def test_regions_that_do_not_fit_the_picture_are_refused(small: Path, region: Any, said: str) -> None:
    content = json.loads(_annotations(small).read_text())
    content["annotations"][0].update(iscrowd=1, segmentation=region)
    _annotations(small).write_text(json.dumps(content))
    with pytest.raises(DataError, match="does not fit its image") as error:
        _open(small).example(0, 0)
    assert said in str(error.value)


def test_pictures_without_people_are_evaluated_but_not_trained_on(small: Path) -> None:
    content = json.loads(_annotations(small).read_text())
    content["annotations"] = [entry for entry in content["annotations"] if entry["image_id"] == 2]
    _annotations(small).write_text(json.dumps(content))
    config = DataConfig(name="coco", root=small, train="val2017")
    assert len(open_files(config, train=False)) == 2
    assert len(open_files(config, train=True)) == 1
    alone = TrainImages(open_files(config, train=True), config.model_copy(update={"size_px": 64}))
    assert alone.batch(np.array([0]), keys(0, 0, np.array([0]))).inputs.shape == (1, 3, 64, 64)
