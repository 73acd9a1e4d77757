"""The ImageNet presets against the recipes that they follow, and settings of classify that can't be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import timm.scheduler
import torch
import torchvision
from PIL import Image, ImageDraw
from torch import nn
from torchvision.models import ResNet50_Weights
from torchvision.transforms import InterpolationMode, v2

import samebits as samebits_package
from samebits.config.document import mapping_layer
from samebits.config.load import load
from samebits.errors import ConfigError
from samebits.optim.schedule import factor
from samebits.recipes.catalog import find
from samebits.recipes.classify.config import RESNETS, Config, ModelConfig
from samebits.recipes.classify.data import Augmentation, resize_px
from samebits.recipes.classify.model import build_model


def refused(*settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Config, [mapping_layer({"recipe": "classify/classify"}, "preset", is_preset=True)], settings)
    return str(caught.value)


@pytest.mark.parametrize("name", ["resnet-34", "resnet43", "efficientnet_b0", "resnet34.pth"])
def test_a_network_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    said = refused(f"model.name={name}")
    assert f'model.name can\'t be "{name}"' in said
    assert all(each in said for each in (*RESNETS, "timm/NAME"))
    assert max(map(len, said.splitlines())) <= 80
    assert "Use model.name=resnet34." in refused("model.name=resnet-34")


def test_every_network_that_is_named_is_torchvisions() -> None:
    assert all(callable(getattr(torchvision.models, name)) for name in RESNETS)


@pytest.mark.parametrize(
    ("setting", "meaning"),
    [
        ("data.mean=[123.7,116.3,103.5]", "Mean of red, green and blue for normalization"),
        ("data.std=[58.4,57.1,57.4]", "Standard deviation of red, green and blue for normalization"),
    ],
)
def test_means_of_bytes_are_refused(setting: str, meaning: str) -> None:
    text = " ".join(refused(setting).split())
    assert meaning in text
    assert "1" in text.partition("allowed")[2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.root=a", "data.train=b", "data.eval=c"], "Set one of them"),
        (["data.train=b"], "train requires eval"),
        (["data.eval=c"], "eval requires train or root"),
    ],
)
def test_places_that_do_not_fit_together_are_explained(settings: list[str], said: str) -> None:
    assert said in refused(*settings)


def test_a_validation_set_can_be_set_besides_the_training_set() -> None:
    for first in ("root", "train"):
        layer = mapping_layer({"recipe": "classify/classify"}, "preset", is_preset=True)
        data = load(Config, [layer], [f"data.{first}=a", "data.eval=b"]).config.data
        assert (data.root or data.train, data.eval) == (Path("a"), Path("b"))


STEPS = 1252  # an epoch of 1,281,167 images in batches of 1,024


def preset(name: str) -> Config:
    return load(Config, find(name).layers, []).config


def rates(config: Config) -> list[float]:
    """The learning rate in the first step of each epoch."""
    num_steps = config.epochs * STEPS
    return [config.peak_lr * factor(epoch * STEPS, num_steps, STEPS, config.optim) for epoch in range(config.epochs)]


def operations(config: Config) -> dict[str, Any]:
    """What the transforms of a preset were made with."""
    made = Augmentation(config.augment, 1000)
    return {"image": made._image, "erase": made._erase, "mix": made._mix.transforms}


def test_resnet50_has_the_schedule_and_the_augmentation_of_torchvisions_recipe() -> None:
    config = preset("classify/imagenet_resnet50")
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.5)
    reference = torch.optim.lr_scheduler.SequentialLR(
        sgd,
        [
            torch.optim.lr_scheduler.LinearLR(sgd, start_factor=0.01, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=600 - 5, eta_min=0.0),
        ],
        milestones=[5],
    )
    expected = []
    for _ in range(600):
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        reference.step()
    assert rates(config) == pytest.approx(expected, abs=1e-5)
    assert rates(config)[0] == 0.005
    assert (config.global_batch, config.loss.label_smoothing, config.optim.weight_decay) == (1024, 0.1, 2e-5)
    assert (config.optim.name, config.optim.momentum, config.optim.nesterov) == ("sgd", 0.9, False)
    assert config.optim.clip_norm is None
    data, published = config.data, ResNet50_Weights.IMAGENET1K_V2
    evaluated = published.transforms()
    assert ([data.size_px], [resize_px(data)]) == (evaluated.crop_size, evaluated.resize_size)
    assert (list(data.mean), list(data.std)) == (evaluated.mean, evaluated.std)
    assert published.meta["recipe"].startswith("https://github.com/pytorch/vision/issues/3995#")
    assert (data.train_px, data.crop_area, data.flip) == (176, (0.08, 1.0), 0.5)
    with torch.device("meta"):
        model = build_model(config.model, 1000)
    assert sum(each.numel() for each in model.parameters()) == published.meta["num_params"]
    # The reference adjusts 0.99998 by the batch: alpha = (1 - 0.99998) * 1024 * 32 / 600 at every 32nd step.
    assert config.optim.ema == pytest.approx((1 - 2e-5 * 1024 * 32 / 600) ** (1 / 32), abs=1e-6)
    made = operations(config)
    (policy,) = made["image"]
    assert (type(policy), policy.interpolation) == (v2.TrivialAugmentWide, InterpolationMode.BILINEAR)
    assert (made["erase"].p, made["erase"].value) == (0.1, [0.0])
    assert [(type(each), each.alpha) for each in made["mix"]] == [(v2.MixUp, 0.2), (v2.CutMix, 1.0)]


def test_vit_small_has_the_schedule_and_the_augmentation_of_deit() -> None:
    config = preset("classify/imagenet_vit_small")
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(()))], lr=5e-4 * 1024 / 512)
    reference = timm.scheduler.CosineLRScheduler(adamw, t_initial=300, lr_min=1e-5, warmup_lr_init=1e-6, warmup_t=5)
    expected = []
    for epoch in range(300):
        reference.step(epoch)  # main.py calls it after the epoch, so that each rate comes one epoch later there
        expected.append(adamw.param_groups[0]["lr"])
    assert rates(config) == pytest.approx(expected, abs=1e-8)
    assert (config.optim.weight_decay, config.loss.label_smoothing, config.model.drop_path) == (0.05, 0.1, 0.1)
    assert (config.global_batch, config.optim.name, config.optim.betas) == (1024, "adamw", (0.9, 0.999))
    # main.py evaluates the weights, not their average.
    assert (config.optim.clip_norm, config.optim.ema) == (None, None)
    # What timm makes of the defaults of main.py. With RandAugment it leaves ColorJitter out.
    crop, flip, policy, _, normalize, erasing = timm.data.create_transform(
        224, is_training=True, color_jitter=0.4, auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic",
        re_prob=0.25, re_mode="pixel", re_count=1,
    ).transforms  # fmt: skip
    data = config.data
    assert (data.crop_area, data.crop_ratio, data.flip) == (crop.scale, pytest.approx(crop.ratio, abs=1e-4), flip.p)
    assert (data.train_px, data.size_px, resize_px(data)) == (None, 224, 256)
    assert (list(data.mean), list(data.std)) == (pytest.approx(normalize.mean), pytest.approx(normalize.std))
    assert (policy.num_layers, {(each.prob, each.magnitude) for each in policy.ops}) == (2, {(0.5, 9)})
    made = operations(config)
    areas = pytest.approx((erasing.min_area, erasing.max_area), abs=0.004)
    assert (made["erase"].p, made["erase"].scale) == (erasing.probability, areas)
    assert erasing.per_pixel
    (policy,) = made["image"]
    assert (type(policy), policy.num_ops, policy.magnitude / (policy.num_magnitude_bins - 1)) == (
        v2.RandAugment,
        1,
        0.9,
    )
    assert (made["erase"].p, made["erase"].value) == (0.25, None)  # None: noise
    assert [(type(each), each.alpha) for each in made["mix"]] == [(v2.MixUp, 0.8), (v2.CutMix, 1.0)]
    with torch.device("meta"):
        model = build_model(config.model, 1000)
    assert sum(each.numel() for each in model.parameters()) == 22_050_664  # of DeiT-S
    assert model.blocks[11].drop_path1.drop_prob == pytest.approx(0.1)


def test_a_resnet_of_torchvision_has_no_stochastic_depth() -> None:
    for name in ("resnet18", "torchvision/resnet18"):
        with pytest.raises(ConfigError, match=f"{name} has no stochastic depth") as caught:
            build_model(ModelConfig(name=name, drop_path=0.5), 4)
        assert "timm/resnet34" in caught.value.slots["fix"]
    assert build_model(ModelConfig(name="timm/resnet18", drop_path=0.5), 4).layer4[1].drop_path is not None


@pytest.mark.parametrize(("name", "px"), [("classify", 96), ("classify/resnet34", 224)])
def test_a_preset_for_own_images_names_its_size(name: str, px: int) -> None:
    assert preset(name).data.size_px == px
    presets = Path(samebits_package.__file__).parent / "recipes/classify/presets"
    text = (presets / f"{Path(name).name}.yaml").read_text(encoding="utf-8")
    assert f"{px} px" in text.splitlines()[0]


@pytest.mark.lab
@pytest.mark.timeout(2400)  # two minutes on two free cores
def test_the_defaults_of_classify_learn_from_three_classes_of_40_photos(tmp_path: Path) -> None:
    # The objects differ in color and shape; position, size and background are random.
    for number, (name, color) in enumerate(
        {"apple": (190, 40, 40), "banana": (220, 200, 60), "leaf": (60, 150, 60)}.items()
    ):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(40):
            random = np.random.default_rng([number, index])
            noise = random.integers(60, 200, (12, 16, 3), dtype=np.uint8)
            image = Image.fromarray(noise).resize((320, 240), Image.Resampling.BICUBIC)
            size, x, y = int(random.integers(60, 110)), int(random.integers(60, 260)), int(random.integers(60, 180))
            box = (x - size // 2, y - size // 2, x + size // 2, y + size // 2)
            shade = tuple(int(value) for value in np.array(color) + random.integers(-30, 30, 3))
            if name == "banana":
                ImageDraw.Draw(image).arc(
                    box, int(random.integers(90)), int(random.integers(170, 250)), shade, size // 4
                )
            else:
                ImageDraw.Draw(image).regular_polygon((x, y, size // 2), 20 if name == "apple" else 4, 0, shade)
            image.save(tmp_path / "photos" / name / f"{index}.jpg")
    run = samebits_package.train("classify", {"data.root": str(tmp_path / "photos")}, procs=2, run_dir=tmp_path / "run")
    assert run.metrics["top1"] >= 0.7  # chance is a third; 0.87 was seen
