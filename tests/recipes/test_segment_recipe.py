"""The segment recipe: networks, loss, predictions and pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from samebits.data.samples import Batch
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.segment.config import MODELS, Config, ModelConfig
from samebits.recipes.segment.recipe import UNet, build, build_model, dataset_info, segment_loss
from tests.recipes.evaluated import evaluated


def config_of(**settings: Any) -> Config:
    data = {"name": "shapes", "size_px": [64, 64], "num_train": 8, "num_eval": 6, **settings.pop("data", {})}
    model = {"width": 4, **settings.pop("model", {})}
    return Config.model_validate_json(json.dumps({"recipe": "segment", "data": data, "model": model, **settings}))


def test_the_unet_has_the_parameters_of_the_reference() -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in UNet(64, 1).parameters()) == 31_037_633


@pytest.mark.parametrize("name", [*MODELS[:1], *(pytest.param(name, marks=pytest.mark.full) for name in MODELS[1:])])
def test_each_network_returns_logits_of_the_images_size(name: str) -> None:
    model = build_model(ModelConfig(name=name, width=4), 3).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 32, 64)).shape == (1, 3, 32, 64)


def test_the_loss_is_the_mean_over_images_without_ignored_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 8, 8, generator=generator, dtype=torch.float64).float().requires_grad_()
    labels = torch.randint(4, (3, 8, 8), generator=generator, dtype=torch.uint8)
    labels[0, :5], labels[2] = IGNORED, IGNORED
    terms = segment_loss(logits, Batch(None, {"labels": labels}, torch.arange(3)), dice=2.0)
    each = [F.cross_entropy(logits[i : i + 1], labels[i : i + 1].long(), ignore_index=IGNORED) for i in (0, 1)]
    torch.testing.assert_close(terms["cross_entropy"], (each[0] + each[1]) / 3)
    probabilities = logits[1].softmax(0)
    truth = F.one_hot(labels[1].long(), 4).permute(2, 0, 1)
    dice = 2 * (probabilities * truth).sum((1, 2)) / (probabilities + truth).sum((1, 2))
    alone = segment_loss(logits[1:2], Batch(None, {"labels": labels[1:2]}, torch.arange(1)), dice=2.0)
    torch.testing.assert_close(alone["dice_loss"], 2 * (1 - dice.mean()))
    sum(terms.values()).backward()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[2].any()
    assert not logits.grad[0, :, :5].any()


def test_an_evaluation_and_a_prediction_are_drawn(tmp_path: Path) -> None:
    config = config_of()
    parts = build(config, json.loads(json.dumps(dataset_info(config))))
    metric = evaluated(parts)
    assert 0 <= metric.result()["mIoU"] <= 1
    parts.draw(metric, parts.eval_data(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"worst.png", "confusion.png"}
    path = tmp_path / "image.png"
    pixels, labels = parts.eval_data().source.read(0, 0)
    Image.fromarray(pixels).resize((90, 120)).save(path)
    inputs = parts.preprocess(path)
    assert inputs.shape == parts.input_shape
    logits = F.one_hot(torch.from_numpy(labels).long(), 4).permute(2, 0, 1).float()
    prediction = json.loads(json.dumps(parts.postprocess(logits)))
    assert sum(row["share"] for row in prediction["classes"]) == pytest.approx(1)
    assert prediction["classes"][0]["class"] == "background"
    assert {row["class"] for row in prediction["classes"]} == {parts.metadata["classes"][i] for i in np.unique(labels)}
    drawn = parts.draw_prediction(path, prediction)
    assert drawn.height > 120
    shape, background = np.argwhere(labels > 0).mean(0) * (120 / 64, 90 / 64), (2, 2)
    y, x = shape.astype(int).tolist()
    if labels[int(y * 64 / 120), int(x * 64 / 90)]:
        assert drawn.getpixel((x, y)) != Image.open(path).getpixel((x, y))
    assert drawn.getpixel(background) == Image.open(path).getpixel(background)
