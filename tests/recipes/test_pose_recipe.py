import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samebits.data.keyed import keys
from samebits.engine.parts import Parts
from samebits.recipes.catalog import find
from samebits.recipes.pose.config import Config
from samebits.recipes.pose.recipe import build
from tests.synthetic_people import with_people

SMALL = {"width": 4, "num_modules": [1, 1, 1], "num_blocks": 1, "stem_width": 8, "stem_blocks": 1, "deconv_blocks": 0}


def _parts(**settings: Any) -> Parts:
    torch.manual_seed(0)
    data = {"size_px": 64, "num_train": 4, "num_eval": 2, "sigma": 1.0, **settings.pop("data", {})}
    config = Config.model_validate({"recipe": "pose", "data": data, "model": {**SMALL, **settings}})
    return with_people(build(config, {}), config)


def _steps(parts: Parts, num_steps: int) -> list[dict[str, float]]:
    data = parts.train_data()
    optimizer = torch.optim.Adam(parts.model.parameters(), lr=5e-3)
    indices, history = np.arange(len(data)), []
    for _ in range(num_steps):
        batch = data.batch(indices, keys(0, 0, indices))
        terms = parts.loss(parts.model(batch.inputs), batch)
        optimizer.zero_grad()
        sum(terms.values(), torch.zeros(())).backward()
        optimizer.step()
        history.append({name: term.item() for name, term in terms.items()})
    return history


def test_the_recipe_learns_finds_draws_and_answers(tmp_path: Path) -> None:
    parts = _parts()
    history = _steps(parts, 20)
    assert list(history[0]) == ["heatmap0", "heatmap1", "push0", "pull0"]
    assert history[-1]["heatmap0"] < 0.8 * history[0]["heatmap0"]

    parts.model.eval()
    data, metric = parts.eval_data(), parts.metric()
    indices = np.arange(len(data))
    with torch.inference_mode():
        batch = data.batch(indices, keys(0, 0, indices))
        metric.add(parts.infer(parts.model, batch.inputs), batch)
    assert metric.num_samples == 2
    assert parts.monitor[0] in metric.result()
    parts.draw(metric, data, tmp_path / "pictures")
    assert list((tmp_path / "pictures").glob("*.png"))

    Image.new("RGB", (90, 70), (120, 40, 40)).save(tmp_path / "a.jpg")
    picture = parts.preprocess(tmp_path / "a.jpg")
    with torch.inference_mode():
        found = parts.infer(parts.model, {"rgb": picture["rgb"][None], "image_id": [picture["image_id"]]})
    answer = parts.postprocess(found[0])
    json.dumps(answer)
    drawn = parts.draw_prediction(tmp_path / "a.jpg", answer)
    assert (drawn.size == (90, 70)) == bool(answer["people"])  # without people, a line of text is below


def test_a_run_starts_from_weights_that_are_given(tmp_path: Path) -> None:
    first = _parts()
    _steps(first, 1)
    torch.save({"state_dict": first.model.state_dict()}, tmp_path / "first.pth")
    second = _parts(weights=str(tmp_path / "first.pth"))
    assert second.init_weights(second.model)
    state = second.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in first.model.state_dict().items())
    assert _parts().init_weights is None


@pytest.mark.parametrize(
    ("preset", "num_joints"), [("pose/crowdpose_w32_512", 14), ("pose/coco_w32_512", 17), ("pose/coco_w48_640", 17)]
)
def test_the_presets_are_the_official_settings(parity_folder: Path, preset: str, num_joints: int) -> None:
    name = preset.partition("/")[2]
    official = json.loads((parity_folder / "pose_models.json").read_text())[name]["config"]
    source = find(preset)
    config = source.load().config
    assert isinstance(config, Config)
    data, train, test = official["DATASET"], official["TRAIN"], official["TEST"]
    assert config.skeleton.num_joints == num_joints == official["MODEL"]["NUM_JOINTS"]
    assert config.model.width == official["MODEL"]["EXTRA"]["STAGE2"]["NUM_CHANNELS"][0]
    ours = (config.data.size_px, config.data.sigma, config.data.max_rotation_deg, config.data.flip)
    assert ours == (data["INPUT_SIZE"], data["SIGMA"], data["MAX_ROTATION"], data["FLIP"])
    ours = (config.data.min_scale, config.data.max_scale, config.data.max_shift_px, config.data.max_people)
    assert ours == (data["MIN_SCALE"], data["MAX_SCALE"], data["MAX_TRANSLATE"], data["MAX_NUM_PEOPLE"])
    assert config.data.scale_side == data["SCALE_TYPE"]
    assert list(config.loss.heatmap) == official["LOSS"]["HEATMAPS_LOSS_FACTOR"]
    assert config.loss.push == official["LOSS"]["PUSH_LOSS_FACTOR"][0]
    assert config.loss.pull == official["LOSS"]["PULL_LOSS_FACTOR"][0]
    assert config.loss.push_form == official["LOSS"]["AE_LOSS_TYPE"]
    assert config.micro_batch == train["IMAGES_PER_GPU"]
    assert (config.epochs, list(config.optim.milestones)) == (train["END_EPOCH"], train["LR_STEP"])
    assert (config.optim.name, config.optim.lr, config.optim.gamma) == ("adam", train["LR"], train["LR_FACTOR"])
    assert config.batch_norm == "sync"
    assert (config.test.flip, config.test.adjust, config.test.refine) == (True, test["ADJUST"], test["REFINE"])
    assert (config.test.detection_threshold, config.test.nms_kernel) == (0.1, test["NMS_KERNEL"])
    assert (config.test.project, config.test.tag_threshold) == (test["PROJECT2IMAGE"], test["TAG_THRESHOLD"])


@pytest.mark.parametrize(
    ("train", "held_out", "both"), [("train+val", "val", "val"), ("trainval", "val", "val"), ("train", "val", None)]
)
def test_a_split_that_is_trained_and_evaluated_on_is_named(train: str, held_out: str, both: str | None) -> None:
    data = {"name": "crowdpose", "root": ".", "train": train, "eval": held_out, "size_px": 64}
    rows = build(Config.model_validate({"recipe": "pose", "data": data, "model": SMALL}), {}).describe
    assert rows["validation"] == (f"warning: {both} is trained on too" if both else "")
