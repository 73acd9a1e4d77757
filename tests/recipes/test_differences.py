"""Documented differences from the references match the settings and the schedule."""

import math
import re
from pathlib import Path

import pytest
import yaml

from samebits.config.schema import OptimConfig
from samebits.optim.schedule import factor

PICTURES, BATCH = 2939, 64  # 3,670 of flower_photos less a fifth of each class; four processes of 16


def tutorial_factor(step: int, steps_per_epoch: int, epochs: int, final_factor: float) -> float:
    """The tutorials' LambdaLR, which is stepped once an epoch."""
    cosine = (1 + math.cos(step // steps_per_epoch * math.pi / epochs)) / 2
    return cosine * (1 - final_factor) + final_factor


def test_the_cosine_is_as_far_from_the_tutorials_as_documented(repo: Path) -> None:
    (row,) = re.findall(
        r"up to ([\d.]+) of the peak learning rate apart \((\d+) epochs of (\d+) steps, `final_factor=([\d.]+)`",
        (repo / "docs/own-images.md").read_text(),
    )
    stated, epochs, per_epoch, final = float(row[0]), int(row[1]), int(row[2]), float(row[3])
    assert per_epoch == math.ceil(PICTURES / BATCH)
    config, steps = OptimConfig(schedule="cosine", final_factor=final), epochs * per_epoch
    pairs = [
        (factor(step, steps, per_epoch, config), tutorial_factor(step, per_epoch, epochs, final))
        for step in range(steps)
    ]
    assert max(abs(ours - theirs) for ours, theirs in pairs) == pytest.approx(stated, abs=5e-5)
    ours, theirs = pairs[-1]
    assert ours == pytest.approx(final)
    assert theirs > final


@pytest.mark.parametrize("name", ["coco_w32_512", "coco_w48_640", "crowdpose_w32_512"])
def test_the_pose_presets_synchronize_batch_norm_as_documented(repo: Path, name: str) -> None:
    recipe = repo / "src/samebits/recipes/pose"
    preset = yaml.safe_load((recipe / f"presets/{name}.yaml").read_text())
    assert preset["batch_norm"] == "sync"
    page = (recipe / "README.md").read_text()
    assert re.search(r"SYNC_BN`\) \| `False`.*`batch_norm: sync`", page)


def test_each_recipe_documents_where_it_differs_from_its_reference(repo: Path) -> None:
    pages = [*(repo / "src/samebits/recipes").glob("*/README.md"), repo / "docs/own-images.md"]
    saying = {page.parent.name for page in pages if "\n## Where it differs from " in page.read_text()}
    assert saying == {"mnist", "text", "pose", "docs"}
