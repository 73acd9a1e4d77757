"""`samebits eval` and `samebits predict` from end to end: an official checkpoint, images in COCO's layout."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samebits.data.samples import Batch
from samebits.recipes.pose.config import Config
from samebits.recipes.pose.infer import make_infer, prepare
from samebits.recipes.pose.metric import PoseMetric
from samebits.recipes.pose.model import HigherHRNet
from samebits.recipes.pose.skeletons import COCO
from tests.runs import samebits

SETTINGS: dict[str, Any] = {
    "data": {"name": "coco", "size_px": 64},
    "model": {"width": 4, "num_modules": [1, 1, 1], "num_blocks": 1, "stem_width": 8, "stem_blocks": 1,
              "deconv_blocks": 1},
    "test": {"flip": True, "scales": [0.5, 1], "max_people": 3, "refine": False},
}  # fmt: skip


def _overrides(root: Path) -> list[str]:
    pairs = [f"{group}.{name}={json.dumps(value)}" for group, each in SETTINGS.items() for name, value in each.items()]
    return [*pairs, f"data.root={root}"]


def _write_coco(root: Path, config: Config, model: HigherHRNet) -> tuple[list[dict[str, Any]], list[Any]]:
    """Pictures of noise; as people every other one of those that this model finds there. Targets, and what is found."""
    folder = root / "images" / "val2017"
    folder.mkdir(parents=True)
    (root / "annotations").mkdir()
    random, infer = np.random.default_rng(0), make_infer(config)
    targets, found, people = [], [], []
    for number, (width, height) in enumerate([(90, 64), (64, 64), (70, 110)], start=11):
        name = f"{number:012d}.png"
        rgb = random.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(rgb).save(folder / name)
        with torch.inference_mode():
            found.append(infer(model.eval(), [prepare(rgb)])[0])
        own = [
            {
                "id": 100 * number + place, "image_id": number, "category_id": 1, "iscrowd": 0,
                "keypoints": np.column_stack([joints[:, :2], 2 * (joints[:, 2] > 0)]).ravel().tolist(),
                "num_keypoints": int((joints[:, 2] > 0).sum()), "area": 2000.0, "bbox": [0.0, 0.0, 50.0, 50.0],
                "segmentation": [],
            }
            for place, joints in enumerate(found[-1].joints[::2])
        ]  # fmt: skip
        people += own
        targets.append({"image_id": number, "file_name": name, "width": width, "height": height, "annotations": own})
    images = [{"id": t["image_id"], **{key: t[key] for key in ("file_name", "width", "height")}} for t in targets]
    category = {"id": 1, "name": "person", "keypoints": list(COCO.joints), "skeleton": []}
    content = {"images": images, "annotations": people, "categories": [category]}
    (root / "annotations" / "person_keypoints_val2017.json").write_text(json.dumps(content))
    return targets, found


@pytest.mark.full
def test_an_official_checkpoint_is_evaluated_with_the_same_figures_on_two_processes(tmp_path: Path) -> None:
    config = Config.model_validate({"recipe": "pose", **SETTINGS})
    torch.manual_seed(1)
    model = HigherHRNet(config.model, COCO.num_joints)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() > 1:  # the official initialisation is so small that nothing is found
                tensor.normal_(0, (1 / tensor[0].numel()) ** 0.5)
    targets, found = _write_coco(tmp_path, config, model)
    metric = PoseMetric(COCO)
    metric.add(found, Batch(None, targets, torch.arange(len(targets))))
    expected = metric.result()
    assert 0.05 < expected["AP"] < 0.95  # else it would say little
    # As HigherHRNet's training writes it.
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"epoch": 300, "state_dict": state, "perf": 0.67}, tmp_path / "official.pth")
    done = samebits(
        "eval", "official.pth", "--preset", "pose/coco_w32_512", *_overrides(tmp_path), "--procs", 2, "--json",
        cwd=tmp_path,
    )  # fmt: skip
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures == pytest.approx(expected, abs=1e-6)
