"""Skeletons are visible on any background, one color per person, at the right positions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samebits.data.samples import Batch
from samebits.recipes.pose.infer import Detections, to_prediction
from samebits.recipes.pose.metric import PoseMetric
from samebits.recipes.pose.recipe import draw_evaluation, draw_people, draw_prediction
from samebits.recipes.pose.skeletons import COCO
from samebits.report.pictures import colors


def _person(left: float, score: float = 0.9) -> Any:
    """Joints in a zigzag from (left, 40) to (left + 32, 140)."""
    places = np.arange(17)
    return np.column_stack([left + 32 * (places % 2), 40 + 6.0 * places, np.full(17, score)])


def _pixels(image: Image.Image) -> Any:
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("ground", [(255, 255, 255), (0, 0, 0), (255, 140, 0), (128, 128, 128)])
def test_every_joint_shows_on_any_ground(ground: tuple[int, int, int]) -> None:
    person = _person(60)
    drawn = _pixels(draw_people(Image.new("RGB", (200, 200), ground), [person], COCO))
    for x, y, _ in person:
        around = drawn[int(y) - 3 : int(y) + 4, int(x) - 3 : int(x) + 4]
        assert np.abs(around - ground).max() > 80


def test_each_person_has_a_color_of_their_own() -> None:
    drawn = _pixels(draw_people(Image.new("RGB", (300, 200)), [_person(40), _person(200)], COCO))
    first, second = colors(2)
    assert np.abs(drawn[40, 40] - first).max() < 25
    assert np.abs(drawn[40, 200] - second).max() < 25
    assert np.abs(np.array(first) - second).max() > 100
    assert len(set(colors(30))) == 30


def test_missing_joints_and_their_limbs_are_left_out() -> None:
    person = _person(60)
    person[8:, 2] = 0
    drawn = _pixels(draw_people(Image.new("RGB", (200, 200)), [person], COCO))
    assert drawn[30:90].any()
    assert not drawn[100:].any()


def test_the_picture_itself_is_not_changed() -> None:
    image = Image.new("RGB", (200, 200))
    draw_people(image, [_person(60)], COCO)
    assert not np.asarray(image).any()


def test_a_file_is_drawn_with_its_answer_and_without_what_is_unsure(tmp_path: Path) -> None:
    path = tmp_path / "street.png"
    Image.new("RGB", (300, 200)).save(path)
    people = np.stack([_person(40), _person(200, score=0.02)])
    facts = to_prediction(Detections(people, np.array([0.9, 0.02])))
    drawn = _pixels(draw_prediction(path, facts, skeleton=COCO))
    assert drawn.shape == (200, 300, 3)
    assert drawn[:, :150].any()
    assert not drawn[:, 150:].any()


def test_an_image_without_people_has_a_caption(tmp_path: Path) -> None:
    path = tmp_path / "empty.png"
    Image.new("RGB", (300, 200)).save(path)
    facts = to_prediction(Detections(np.zeros((0, 17, 3)), np.zeros(0)))
    drawn = _pixels(draw_prediction(path, facts, skeleton=COCO))
    assert not drawn[:200].any()
    assert (drawn[200:] < 100).any()
    assert (drawn[200:] == 255).any()


class Dark:
    """Samples that are dark gray."""

    def rgb(self, index: int) -> Any:
        return np.full((200, 300, 3), 40 + index, np.uint8)


def test_an_evaluation_is_drawn_as_found_and_there(tmp_path: Path) -> None:
    metric = PoseMetric(COCO)
    people = [
        {"keypoints": _person(40).ravel().tolist(), "num_keypoints": 17, "area": 900.0, "bbox": [0, 0, 50, 50],
         "iscrowd": 0, "category_id": 1, "id": 1},
    ]  # fmt: skip
    targets = [{"image_id": number, "annotations": people, "crowd_index": None} for number in (7, 8, 9)]
    found = [Detections(_person(200)[None], np.ones(1))] * 3
    metric.add(found, Batch(None, targets, torch.arange(3)))
    draw_evaluation(metric, Dark(), tmp_path)
    sheet = _pixels(Image.open(tmp_path / "people.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["people.png"]
    # Panels of 240x160 px from (24, 94) on: what was found is right in the first, what is there left in the next.
    found_panel, there_panel = (sheet[95:253, 24 + 240 * n : 264 + 240 * n] for n in range(2))

    def is_colored(part: Any) -> bool:
        return bool((part.max(axis=2) - part.min(axis=2) > 100).any())

    assert is_colored(found_panel[:, 120:])
    assert not is_colored(found_panel[:, :100])
    assert is_colored(there_panel[:, :100])
    assert not is_colored(there_panel[:, 120:])


def test_an_evaluation_of_no_image_draws_nothing(tmp_path: Path) -> None:
    draw_evaluation(PoseMetric(COCO), Dark(), tmp_path)
    assert not list(tmp_path.iterdir())
