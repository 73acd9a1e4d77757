"""Parameters that are frozen, the moving average of the others, and batch norm over a single value."""

import re

import pytest
import torch
from torch import nn

from samebits.config.schema import OptimConfig, RunConfig
from samebits.data.division import smallest_micro_batch
from samebits.errors import ConfigError
from samebits.module.check_model import check_batches
from samebits.module.ema import ModelEma
from samebits.module.freeze import freeze
from samebits.optim.build import optimizer
from samebits.portable.arithmetic import portable_arithmetic
from samebits.recipes.segment.config import ModelConfig
from samebits.recipes.segment.recipe import build_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(self.stem(x)).mean((2, 3)))


def test_a_module_stands_for_all_that_is_in_it() -> None:
    model = Net()
    names = freeze(model, ["stem"])
    assert names == ["stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias"]
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == names
    assert not model.stem[1].training
    assert model.body[1].training


@pytest.mark.parametrize("patterns", [["stem", "body"], ["stem*", "body*"], ["[sb]*"]])
def test_a_frozen_backbone_does_not_change_by_a_bit_in_training_and_the_head_does(patterns: list[str]) -> None:
    model = Net()
    freeze(model, patterns)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    update = optimizer(model, OptimConfig(lr=0.1, weight_decay=0.1))
    for _ in range(3):
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
        update.step()
    after = model.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"fc.weight", "fc.bias"}


def test_a_pattern_of_parameters_freezes_these_alone() -> None:
    model = Net()
    assert freeze(model, ["*.bias"]) == ["stem.0.bias", "stem.1.bias", "body.0.bias", "body.1.bias", "fc.bias"]
    assert model.stem[1].training, "its weight is trained, and its statistics with it"


def test_a_batch_norm_whose_parameters_are_frozen_keeps_its_statistics() -> None:
    model = Net()
    freeze(model, ["stem.1.weight", "stem.1.bias"])
    assert not model.stem[1].training


def test_nothing_is_frozen_by_no_pattern() -> None:
    assert freeze(Net(), []) == []


def test_an_unknown_part_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="bdy is no part of the model") as caught:
        freeze(Net(), ["stem", "bdy"])
    assert "body" in caught.value.slots["fix"]
    assert caught.value.slots["allowed"].startswith("stem, body, fc, ")


def test_the_parts_of_a_large_model_are_named_within_80_columns() -> None:
    model = nn.ModuleDict({f"transition_of_stage_{i}": nn.Linear(2, 2) for i in range(13)})
    with pytest.raises(ConfigError, match="stage_9") as caught:
        freeze(model, ["stage_9"])
    assert all(len(line) <= 80 for line in str(caught.value).splitlines())
    assert caught.value.slots["allowed"].replace("\n", " ").endswith("…, names inside them, and * for any text")


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        freeze(Net(), ["*"])


def test_the_average_follows_its_rule() -> None:
    model = nn.BatchNorm2d(1)
    model.weight.data.fill_(0.0)
    average = ModelEma(model, 0.5)
    expected = 0.0
    for num_steps, value in enumerate([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0], start=1):
        model.weight.data.fill_(value)
        model.num_batches_tracked.fill_(num_steps)
        average.update(num_steps)
        decay = min(0.5, (1 + num_steps) / (10 + num_steps))
        expected = decay * expected + (1 - decay) * value
        assert float(average.state["weight"]) == pytest.approx(expected, rel=1e-6)
        assert int(average.state["num_batches_tracked"]) == num_steps


def test_the_model_has_the_average_for_a_while_and_then_its_own_weights_whatever_happens() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    average = ModelEma(model, 0.9)
    started = model.weight.detach().clone()
    model.weight.data += 1
    parameter = model.weight

    def look() -> None:
        with average.in_place():
            assert torch.equal(model.weight, started)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look()
    assert torch.equal(model.weight, started + 1)
    assert model.weight is parameter, "the optimizer knows it"
    assert average.state["weight"].is_contiguous(memory_format=torch.channels_last)


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
