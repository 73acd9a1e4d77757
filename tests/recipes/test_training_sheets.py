"""The sheet of training samples of each recipe: as many tiles as samples, with the labels that the loss sees."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from samebits.data.keyed import keys
from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.recipes.catalog import find
from samebits.recipes.classify import recipe as classify
from samebits.recipes.classify.config import MakeConfig
from samebits.recipes.classify.make import make
from samebits.recipes.mnist import recipe as mnist
from samebits.recipes.pose import data, recipe
from samebits.recipes.pose import recipe as pose
from samebits.recipes.pose.skeletons import COCO
from samebits.recipes.segment import recipe as segment
from samebits.recipes.text import recipe as text
from tests.ranks.recipes_in_ranks import draw_digits
from tests.synthetic_people import with_people


def _parts(name: str, tmp_path: Path) -> Parts:
    overrides = {
        "classify": [f"data.root={tmp_path / 'shapes'}"],
        "text": [f"data.train={tmp_path / 'l.tsv'}", "data.val_fraction=0.1"],
        "pose": ["data.num_train=4"],
        "digits": [],
        "segment_shapes": [],
    }[name]
    if name == "classify":
        make(MakeConfig(num_per_class=4, size_px=64), tmp_path / "shapes")
    if name == "text":
        draw_digits(tmp_path, 30)
    found = find(name)
    config = found.load(overrides).config
    builders: dict[str, Callable[[], Parts]] = {
        "digits": lambda: mnist.build(config),  # type: ignore[arg-type]
        "classify": lambda: classify.build(config, classify.dataset_info(config)),  # type: ignore[arg-type]
        "text": lambda: text.build(config, text.dataset_info(config)),  # type: ignore[arg-type]
        "pose": lambda: with_people(pose.build(config, {}), config),  # type: ignore[arg-type]
        "segment_shapes": lambda: segment.build(config, segment.dataset_info(config)),  # type: ignore[arg-type]
    }
    return builders[name]()


def _batch(parts: Parts, count: int) -> Batch:
    indices = np.arange(count)
    return parts.train_data().batch(indices, keys(0, 0, indices))


@pytest.mark.parametrize("name", ["digits", "classify", "text", "pose", "segment_shapes"])
def test_training_samples_are_drawn_and_left_as_they_are(name: str, tmp_path: Path) -> None:
    parts = _parts(name, tmp_path)
    batch = _batch(parts, 4)
    before, states = batch.inputs.clone(), (torch.get_rng_state(), random.getstate())
    for count in (1, 4):
        parts.draw_samples([batch.head(count)], tmp_path / "new" / f"{count}.png")
    assert torch.equal(batch.inputs, before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    with Image.open(tmp_path / "new/1.png") as one, Image.open(tmp_path / "new/4.png") as four:
        more = np.asarray(four).astype(int).sum() - np.asarray(one.resize(four.size)).astype(int).sum()
        assert more != 0
        assert np.asarray(four.convert("L")).min() < 60


def test_joints_are_drawn_where_the_heatmaps_have_their_peaks() -> None:
    joints = np.zeros((1, 17, 3))
    joints[0, :, 0], joints[0, :, 1], joints[0, :, 2] = np.arange(17) * 3 + 2, np.arange(17) * 2 + 5, 2
    joints[0, 4, 2] = 0
    found = recipe._joints(data.index_joints(joints, 64, 30)[0], 64)
    assert found[:, 2].tolist() == [float(place != 4) for place in range(17)]
    seen = found[:, 2] > 0
    np.testing.assert_array_equal(found[seen, :2], joints[0, seen, :2])


def test_what_the_loss_leaves_out_is_dark() -> None:
    image, mask = np.zeros((256, 256, 3), np.float32), np.ones((64, 64), np.float32)
    mask[:32] = 0
    tile = recipe._tile(image, mask, [], COCO).astype(int)
    assert tile[10:100].mean() < 0.5 * tile[140:].mean()
