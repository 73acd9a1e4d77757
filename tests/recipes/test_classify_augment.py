"""Augmentation by torchvision.transforms.v2: its values. `tests/ranks/test_recipe_worlds.py` has whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from samebits.data.keyed import key, keys
from samebits.data.loader import Loader
from samebits.recipes.classify.config import AugmentConfig
from samebits.recipes.classify.data import Augmentation
from tests.recipes.class_folders import opened
from tests.recipes.class_folders import shapes as make_shapes

CPU = torch.device("cpu")
ALL: dict[str, Any] = {
    "policy": "randaugment", "brightness": 0.4, "hue": 0.1, "erasing": 0.5, "erasing_fill": "noise", "mixup": 0.2,
    "cutmix": 1.0, "mix_probability": 0.8,
}  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shapes(tmp_path_factory.mktemp("shapes"), 12, 60)


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment_wide"])
def test_a_sample_has_the_same_bytes_in_any_batch_and_after_any_other_draws(shapes: Path, policy: Any) -> None:
    samples = opened(shapes, augment=AugmentConfig(policy=policy, saturation=0.3))
    chosen = np.arange(20)
    together = samples.batch(chosen, keys(3, 1, chosen)).inputs
    torch.manual_seed(99)
    for index in (17, 4):
        one = np.array([index])
        assert torch.equal(samples.batch(one, keys(3, 1, one)).inputs[0], together[index])
    plain = opened(shapes, augment=AugmentConfig()).batch(chosen, keys(3, 1, chosen)).inputs
    changed = (together != plain).flatten(1).any(1)
    assert changed.sum() >= 15  # identity and zero magnitudes are among the operations
    other_epoch = samples.batch(chosen, keys(3, 2, chosen)).inputs
    assert not torch.equal(other_epoch, together)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        ({"policy": "randaugment", "num_ops": 3, "magnitude": 12},
         v2.RandAugment(3, 12, interpolation=InterpolationMode.BILINEAR)),
        ({"policy": "trivialaugment_wide"}, v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR)),
        ({"brightness": 0.4, "contrast": 0.3, "saturation": 0.2, "hue": 0.1}, v2.ColorJitter(0.4, 0.3, 0.2, 0.1)),
    ],
)  # fmt: skip
def test_images_have_torchvisions_values(config: dict[str, Any], reference: Any) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (12, 24, 24, 3), dtype=torch.uint8)
    ours, sample_keys = images.clone(), keys(0, 0, np.arange(12)).tolist()
    Augmentation(AugmentConfig(**config), 5).augment(ours, sample_keys)
    for image, mine, sample_key in zip(images, ours, sample_keys, strict=True):
        torch.manual_seed(key(sample_key, 1))
        assert torch.equal(reference(image.permute(2, 0, 1)).permute(1, 2, 0), mine)


def test_a_micro_batch_is_mixed_and_erased_as_by_torchvision() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(6, 3, 24, 24), torch.tensor([0, 1, 2, 3, 4, 0])
    augmentation = Augmentation(AugmentConfig(mixup=0.2, cutmix=1.0, erasing=0.4), 5)
    erase = v2.RandomErasing(0.4, value=0)
    mix = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=5), v2.CutMix(alpha=1.0, num_classes=5)])
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        mixed, probabilities = augmentation.augment_batch(inputs.clone(), targets)
        torch.manual_seed(seed)
        erased = torch.stack([erase(image) for image in inputs])
        torch.rand(())  # compared with mix_probability
        expected = mix(erased, targets)
        assert torch.equal(mixed, expected[0])
        assert torch.equal(probabilities, expected[1])
        assert torch.allclose(probabilities.sum(1), torch.ones(6))
        seen.add(bool((mixed == erased).flatten(1).any(1).any()))
    assert seen == {True, False}  # CutMix keeps pixels, MixUp keeps none


def test_unmixed_micro_batches_keep_their_classes() -> None:
    inputs, targets = torch.randn(4, 3, 8, 8), torch.tensor([2, 0, 1, 1])
    augmentation = Augmentation(AugmentConfig(mixup=0.2, mix_probability=1e-9), 3)
    same, probabilities = augmentation.augment_batch(inputs.clone(), targets)
    assert torch.equal(same, inputs)
    assert probabilities.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 1, 0]]


def test_micro_batches_are_pure_functions_of_their_keys_with_and_without_workers(shapes: Path) -> None:
    samples = opened(shapes, augment=AugmentConfig(**ALL))
    requests = [(chosen, keys(0, 0, chosen)) for chosen in np.arange(24).reshape(3, 8)]
    batches = []
    for num_workers in (0, 2):
        loader = Loader(samples, lambda: iter(requests), CPU, num_workers=num_workers)
        torch.manual_seed(num_workers)
        batches.append([loader.batch(*request) for request in requests])
        loader.close()
    again = Loader(samples, lambda: iter(requests), CPU).batch(*requests[1], again=True)
    for here, there in zip(*batches, strict=True):
        assert torch.equal(here.inputs, there.inputs)
        assert torch.equal(here.targets, there.targets)
    assert torch.equal(again.inputs, batches[0][1].inputs)


def test_evaluation_is_not_augmented_and_has_the_models_size(shapes: Path) -> None:
    chosen = np.arange(6)
    augmented = opened(shapes, augment=AugmentConfig(**ALL), train=False, train_px=24)
    plain = opened(shapes, augment=AugmentConfig(), train=False)
    batches = [samples.finish(samples.batch(chosen, keys(0, 0, chosen))) for samples in (augmented, plain)]
    assert torch.equal(batches[0].inputs, batches[1].inputs)
    assert batches[0].targets.dtype == torch.int64
    assert opened(shapes, augment=AugmentConfig(), train_px=24).batch(chosen, keys(0, 0, chosen)).inputs.shape == (
        6,
        24,
        24,
        3,
    )
