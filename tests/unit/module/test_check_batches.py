"""Batch norm over a single value is refused before the first step, with sizes that work."""

import re

import pytest
import torch
from torch import nn

from samebits.config.schema import RunConfig
from samebits.data.division import smallest_micro_batch
from samebits.errors import ConfigError
from samebits.module.check_model import check_batches
from samebits.portable.arithmetic import portable_arithmetic
from samebits.recipes.segment.config import ModelConfig
from samebits.recipes.segment.recipe import build_model


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def settings(global_batch: int, micro_batch: int, batch_norm: str = "micro") -> RunConfig:
    return RunConfig.model_validate(
        {"recipe": "mnist", "global_batch": global_batch, "micro_batch": micro_batch, "batch_norm": batch_norm}
    )


@pytest.mark.parametrize(
    ("num_samples", "global_batch", "micro_batch"),
    [(25, 4, 1), (25, 5, 1), (61, 2, 2), (9, 8, 4), (2, 1, 1), (5, 4, 2), (17, 16, 16)],
)
@pytest.mark.parametrize("batch_norm", ["micro", "sync"])
def test_the_sizes_of_the_fix_are_valid(num_samples: int, global_batch: int, micro_batch: int, batch_norm: str) -> None:
    given = settings(global_batch, micro_batch, batch_norm)
    try:
        check_batches(given, pooled(), num_samples, (3, 8, 8))
    except ConfigError as error:
        fix = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", error.slots["fix"])}
        assert fix
        check_batches(given.model_copy(update=fix), pooled(), num_samples, (3, 8, 8))
    else:
        assert batch_norm == "sync"
        assert smallest_micro_batch(num_samples, global_batch, global_batch) > 1


def test_maps_of_several_pixels_and_frozen_norms_need_no_second_sample() -> None:
    wide, small = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(), nn.BatchNorm2d(4)), pooled()
    state = torch.get_rng_state()
    check_batches(settings(8, 4), wide, 9, (3, 8, 8))
    check_batches(settings(8, 4), small, 9)  # the size of the input is not known
    check_batches(settings(8, 4), small.eval(), 9, (3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ConfigError, match="micro-batch of one sample"):
        check_batches(settings(8, 4), nn.BatchNorm1d(4), 9)


def test_portable_arithmetic_looks_at_shapes_as_well() -> None:
    # torch ended the process here (SIGABRT), so every run with a micro-batch of one sample.
    with portable_arithmetic():
        check_batches(settings(8, 4), nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), 9, (3, 8, 8))
        with pytest.raises(ConfigError, match="micro-batch of one sample"):
            check_batches(settings(8, 4), pooled(), 9, (3, 8, 8))


def test_a_single_training_sample_has_no_such_sizes() -> None:
    with pytest.raises(ConfigError) as caught:
        check_batches(settings(8, 4), pooled(), 1, (3, 8, 8))
    assert caught.value.slots["fix"] == "Add training samples."


def test_deeplab_refuses_micro_batches_of_one_image() -> None:
    model = build_model(ModelConfig(name="deeplabv3_resnet50"), 2)
    check_batches(settings(8, 4), model, 8, (3, 32, 32))
    with pytest.raises(ConfigError, match="micro-batch of one sample"):
        check_batches(settings(8, 4), model, 9, (3, 32, 32))
