"""Precision: what computes in which numbers, and a loss scale that rounds nothing."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from samebits.cluster.world import alone
from samebits.config.schema import RunConfig
from samebits.data.order import Order
from samebits.engine.progress import Progress, init_scale, update_scale
from samebits.errors import ConfigError
from samebits.module import precision
from samebits.module.precision import in_float32, use_precision
from samebits.parallel.reduce import Reducer

CPU = torch.device("cpu")


def config(**values: Any) -> RunConfig:
    return RunConfig(recipe="test", **values)


class Pair(NamedTuple):
    first: Tensor
    second: int


@dataclass(frozen=True)
class Found:
    boxes: Tensor
    name: str


def test_outputs_are_float32_in_all_containers() -> None:
    half, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)
    outputs = in_float32({"a": [half, (whole, half.half())], "b": Pair(half, 3), "c": Found(half, "x"), "d": None})
    assert outputs["a"][0].dtype == outputs["a"][1][1].dtype == torch.float32
    assert outputs["a"][1][0] is whole
    assert isinstance(outputs["b"], Pair)
    assert outputs["b"].first.dtype == torch.float32
    assert (outputs["b"].second, outputs["c"].name, outputs["d"]) == (3, "x", None)
    assert outputs["c"].boxes.dtype == torch.float32
    assert isinstance(in_float32(OrderedDict(x=half)), OrderedDict)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_model_computes_low_and_gives_and_keeps_float32(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    names = list(model.state_dict())
    use_precision(model, config(precision=name), CPU)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    for net in (model, copy.deepcopy(model)):
        outputs = net(torch.randn(4, 1, 6, 6))
        assert seen.pop() == dtype
        assert outputs.dtype == torch.float32
        outputs.square().mean().backward()
    assert model[0].weight.dtype == torch.float32
    assert model[0].weight.grad.dtype == torch.float32
    assert model[1].running_mean.dtype == torch.float32
    assert list(model.state_dict()) == names
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "Sequential"
    assert not torch.is_autocast_enabled("cpu")


def test_fp32_leaves_the_model_as_it_is() -> None:
    model = nn.Linear(2, 2)
    use_precision(model, config(), CPU)
    assert type(model) is nn.Linear


def test_a_copy_computes_with_its_own_weights() -> None:
    model = nn.Linear(2, 2)
    use_precision(model, config(precision="bf16"), CPU)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    assert other(torch.ones(1, 2)).abs().sum() == 0
    assert model(torch.ones(1, 2)).abs().sum() > 0


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="tf32 needs an NVIDIA GPU"):
        use_precision(nn.Linear(2, 2), config(precision="tf32"), CPU)


def test_a_device_that_can_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_can_autocast", lambda *_: False)
    with pytest.raises(ConfigError, match="can't compute in fp16"):
        use_precision(nn.Linear(2, 2), config(precision="fp16"), CPU)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"loss_scale": 1024}, "loss_scale=1024.0 cannot be combined with precision=fp32"),
        ({"precision": "fp16", "loss_scale": 1000}, "Set loss_scale=512 or loss_scale=1024"),
        ({"precision": "fp16", "loss_scale": 0.5}, "greater than or equal to 1"),
        ({"precision": "fp8"}, "'fp32', 'tf32', 'bf16' or 'fp16'"),
    ],
)
def test_settings_that_can_not_be_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        config(**values)


def test_where_the_scale_starts() -> None:
    assert init_scale(config()) == init_scale(config(precision="bf16")) == 1
    assert init_scale(config(precision="fp16")) == 65536
    assert init_scale(config(precision="fp16", loss_scale=256)) == 256


def test_a_dynamic_scale_halves_after_an_overflow_and_doubles_after_2000_good_steps() -> None:
    fp16 = config(precision="fp16")
    progress = Progress(loss_scale=1024)
    for _ in range(1999):
        assert not update_scale(progress, fp16, [1.0], is_finite=True)
    assert progress.loss_scale == 1024
    update_scale(progress, fp16, [1.0], is_finite=True)
    assert (progress.loss_scale, progress.scale_age) == (2048, 0)
    update_scale(progress, fp16, [1.0], is_finite=True)
    assert update_scale(progress, fp16, [1.0], is_finite=False)
    assert (progress.loss_scale, progress.scale_age, progress.num_overflows) == (1024, 0, 1)


def test_what_a_smaller_scale_can_not_cure_is_no_overflow() -> None:
    fp16 = config(precision="fp16")
    for progress, terms, chosen in [
        (Progress(loss_scale=1), [1.0], fp16),  # at the floor
        (Progress(loss_scale=1024), [0.5, float("nan")], fp16),  # the loss itself
        (Progress(loss_scale=1024), [1.0], config(precision="fp16", loss_scale=1024)),  # a scale that the user set
        (Progress(), [1.0], config(precision="bf16")),
    ]:
        before = copy.copy(progress)
        assert not update_scale(progress, chosen, terms, is_finite=False)
        assert progress == before


def test_a_scale_that_falls_to_its_floor_gives_up_there() -> None:
    progress, fp16 = Progress(loss_scale=65536), config(precision="fp16")
    assert [update_scale(progress, fp16, [1.0], is_finite=False) for _ in range(17)] == [True] * 16 + [False]
    assert (progress.loss_scale, progress.num_overflows) == (1, 16)


@settings(max_examples=20, deadline=None)
@given(exponent=st.integers(0, 24), num_samples=st.integers(1, 9), seed=st.integers(0, 2**20))
def test_the_loss_scale_changes_no_bit(exponent: int, num_samples: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs = torch.randn(num_samples, 3)
    reducer = Reducer(model, alone("cpu"), num_extras=1)
    (step,) = Order(num_samples, num_samples, 2, seed=seed).steps(alone("cpu"), stop=1)
    found = []
    for scale in (1.0, 2.0**exponent):
        reducer.begin(step, scale)
        for micro in step.micro_batches:
            with reducer.micro_batch(micro):
                loss = model(inputs[micro.indices]).square().sum(1).mean()
                reducer.backward(loss, loss.view(1))
        reducer.reduce()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        found.append((grads, reducer.norm, reducer.extras))
    assert found[0][1:] == found[1][1:]
    assert all(torch.equal(one, two) for one, two in zip(found[0][0], found[1][0], strict=True))
