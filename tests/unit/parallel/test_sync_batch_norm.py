"""Synchronized batch norm in one process: any cut of a batch gives what torch's gives of the whole; its errors."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samebits.data.order import Order
from samebits.errors import ConfigError, TrainError
from samebits.parallel.reduce import Reducer
from tests.unit.parallel.sync_step import HERE, call, objective, train_step


def both(layer: nn.Module, inputs: Tensor, micro_batch: int, num_steps: int = 2, tolerance: float = 1e-5) -> nn.Module:
    """Compare outputs, gradients and buffers of cut batches with torch's of whole ones; the inputs' gradient too."""
    shift = nn.Parameter(torch.zeros(inputs.shape[1:]))

    class Whole(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.shift = layer, nn.Parameter(shift.clone())

        def forward(self, values: Tensor) -> Tensor:
            outputs: Tensor = self.layer(values + torch.tanh(values * (0.5 + self.shift)))
            return outputs

    expected = Whole(copy.deepcopy(layer)).train()
    model = Whole(layer).train()
    reducer = Reducer(model, HERE, synchronized=True)
    targets = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(5))
    for _ in range(num_steps):
        outputs = train_step(model, reducer, inputs, targets, micro_batch)
        whole = expected(inputs)
        expected.zero_grad()
        objective(whole, targets).backward()
        torch.testing.assert_close(torch.stack(outputs), whole.detach(), rtol=tolerance, atol=tolerance)
        for (name, one), (_, two) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            assert one.grad is not None, name
            size = float(two.grad.abs().max())
            torch.testing.assert_close(one.grad, two.grad, rtol=tolerance, atol=tolerance * size, msg=name)
        for (name, one), (_, two) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
            # A mean near 0 has the rounding of the values that cancel.
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6 * max(1.0, float(inputs.abs().max())), msg=name)
    assert model.state_dict().keys() == expected.state_dict().keys()
    return model


SHAPES: list[tuple[type[nn.Module], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (5,)),
    (nn.BatchNorm1d, (5, 7)),
    (nn.BatchNorm2d, (5, 4, 6)),
    (nn.BatchNorm3d, (5, 2, 3, 4)),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.7, "eps": 0.1},
]


@pytest.mark.parametrize(("kind", "shape"), SHAPES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_cut_batch_gives_what_torch_gives_of_the_whole(
    kind: type[nn.Module], shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    layer = kind(shape[0], **options)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    # 11 samples in micro-batches of 3, 3, 3 and 2.
    both(layer, torch.randn(11, *shape) * 3 + 1, micro_batch=3)


def test_pictures_with_channels_last_stay_so() -> None:
    inputs = torch.randn(9, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    formats = []
    layer = nn.BatchNorm2d(8)
    layer.register_forward_hook(
        lambda _, __, output: formats.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    both(layer, inputs, micro_batch=2)
    assert len(formats) >= 10
    assert all(formats)


@settings(max_examples=15, deadline=None)
@given(
    num=st.integers(2, 24),
    micro_batch=st.integers(1, 12),
    size=st.integers(1, 4),
    scale=st.floats(1e-3, 1e3),
    offset=st.floats(-3, 3),
    seed=st.integers(0, 2**31),
)
def test_any_cut_gives_what_torch_gives_of_the_whole(
    num: int, micro_batch: int, size: int, scale: float, offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = (torch.randn(num, 3, size, size, generator=generator) + offset) * scale
    both(nn.BatchNorm2d(3, eps=0.1 * scale**2), inputs, micro_batch, num_steps=1, tolerance=1e-4)


def test_values_far_from_zero_lose_no_more_than_with_torch() -> None:
    # Standard deviation 1 at 1,000: sums of squares in float32 would lose all of it.
    inputs = torch.randn(64, 4, 8, 8, generator=torch.Generator().manual_seed(3)) + 1000
    layer = nn.BatchNorm2d(4)
    reducer = Reducer(layer, HERE, synchronized=True)
    outputs = torch.stack(train_step(layer, reducer, inputs, inputs, 5))
    exact = F.batch_norm(inputs.double(), None, None, training=True)
    torch_error = (F.batch_norm(inputs, None, None, training=True) - exact).abs().max()
    assert (outputs - exact).abs().max() < 2 * torch_error
    torch.testing.assert_close(
        layer.running_var, 0.9 + 0.1 * inputs.double().transpose(0, 1).flatten(1).var(1).float(), rtol=1e-6, atol=0
    )


def test_each_micro_batch_has_its_own_dropout_and_buffers() -> None:
    class Net(nn.Module):
        averaged_buffers = ("seen",)

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.drop = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout()
            self.masks: dict[bytes, Tensor] = {}  # by the inputs
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen += 1
            hidden = self.norm(self.drop(self.first(inputs)))
            assert self.seen == 1, "another micro-batch's count shows"
            mask: Tensor = self.drop(torch.ones_like(hidden))
            self.masks[inputs.numpy().tobytes()] = mask
            return hidden * mask

    torch.manual_seed(1)
    model = Net()
    inputs = torch.randn(8, 3)
    masks: list[dict[bytes, Tensor]] = []
    for synchronized in (False, True):
        net = copy.deepcopy(model)
        train_step(net, Reducer(net, HERE, synchronized=synchronized), inputs, torch.ones(8, 6), 2)
        assert net.seen == 1
        masks.append(net.masks)
    alone, together = masks
    first, second, *_ = alone.values()
    assert not torch.equal(first, second)
    # The second dropout draws after the wait, and still the numbers that it would draw alone.
    assert len(alone) == 4
    assert all(torch.equal(mask, together[key]) for key, mask in alone.items())


def test_a_frozen_batch_norm_is_not_synchronized() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[1].eval()
    inputs, targets = torch.randn(7, 4), torch.randn(7, 4)
    expected = copy.deepcopy(model)
    reducer = Reducer(model, HERE, synchronized=True)
    outputs = train_step(model, reducer, inputs, targets, 2)
    torch.testing.assert_close(torch.stack(outputs), expected(inputs).detach())
    assert isinstance(model[1].num_batches_tracked, Tensor)
    assert [int(layer.num_batches_tracked) for layer in model[1:]] == [0, 1]


def test_a_batch_norm_may_be_passed_twice() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(), norm)
    expected, inputs, targets = copy.deepcopy(model), torch.randn(7, 4), torch.randn(7, 4)
    outputs = train_step(model, Reducer(model, HERE, synchronized=True), inputs, targets, 3)
    whole = expected(inputs)
    objective(whole, targets).backward()
    torch.testing.assert_close(torch.stack(outputs), whole.detach())
    torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)
    # Both passes start from the step's old value one after the other, as in one big batch.
    torch.testing.assert_close(norm.running_mean, expected[1].running_mean)


def test_layers_that_are_computed_again_in_the_backward_pass_meet_there_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    again, inputs, targets = copy.deepcopy(model), torch.randn(9, 4), torch.randn(9, 4)
    train_step(model, Reducer(model, HERE, synchronized=True), inputs, targets, 2)

    def forward(model: nn.Module, values: Tensor) -> Tensor:
        assert isinstance(model, nn.Sequential)
        hidden: Tensor = checkpoint(model[:3], values, use_reentrant=False)
        outputs: Tensor = model[3](hidden)
        return outputs

    train_step(again, Reducer(again, HERE, synchronized=True), inputs, targets, 2, forward)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


def test_outside_of_a_step_it_is_an_ordinary_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    Reducer(model, HERE, synchronized=True)
    inputs = torch.randn(6, 3)
    torch.testing.assert_close(model(inputs), F.batch_norm(model[0](inputs), None, None, training=True))
    copied = copy.deepcopy(model).eval()
    model.eval()
    assert torch.equal(copied(inputs), model(inputs))


def test_a_model_without_batch_norm_runs_as_ever() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    other, inputs, targets = copy.deepcopy(model), torch.randn(9, 4), torch.randn(9, 4)
    train_step(model, Reducer(model, HERE, synchronized=True), inputs, targets, 2)
    train_step(other, Reducer(other, HERE), inputs, targets, 2)
    assert model.weight.grad is not None
    assert other.weight.grad is not None
    assert torch.equal(model.weight.grad, other.weight.grad)


class Forking(nn.Module):
    """Passes its batch norm only with some samples; without a gradient, with others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(1, 4), nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        if inputs[0] == 1:
            return hidden
        normalized: Tensor = self.norm(hidden)
        return hidden + normalized.detach() if inputs[0] == 2 else normalized


@pytest.mark.parametrize(
    ("special", "says"),
    [
        (1.0, "micro-batch 0 is at norm, forward\nmicro-batch 2 is at its end"),
        (2.0, "micro-batch 0 is at norm, backward\nmicro-batch 2 is at its end"),
    ],
    ids=["forward", "backward"],
)
def test_micro_batches_that_part_ways_are_named(special: float, says: str) -> None:
    model = Forking()
    reducer = Reducer(model, HERE, synchronized=True)
    (step,) = Order(12, 12, 3).steps(HERE, stop=1)
    inputs = torch.zeros(12, 1)
    inputs[step.micro_batches[2].indices] = special

    def run(micro: Any) -> None:
        with reducer.micro_batch(micro):
            reducer.backward(model(inputs[micro.indices]).square().mean())

    reducer.begin(step)
    with pytest.raises(TrainError, match="do not reach the same layers") as caught:
        reducer.run(run)
    assert caught.value.slots["where"] == says
    assert "batch_norm=micro" in caught.value.slots["fix"]


def test_an_error_in_one_micro_batch_is_raised_and_the_next_step_is_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    reducer = Reducer(model, HERE, synchronized=True)
    expected = torch.stack(train_step(model, reducer, inputs, targets, 2))
    reducer.undo_buffers()
    calls: list[int] = []

    def failing(model: nn.Module, values: Tensor) -> Tensor:
        outputs = call(model, values)
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("no more")
        return outputs

    with pytest.raises(ArithmeticError, match="no more"):
        train_step(model, reducer, inputs, targets, 2, failing)
    reducer.undo_buffers()
    assert torch.equal(torch.stack(train_step(model, reducer, inputs, targets, 2)), expected)


def test_a_loop_that_runs_micro_batches_one_after_the_other_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    reducer = Reducer(model, HERE, synchronized=True)
    (step,) = Order(4, 4, 2).steps(HERE, stop=1)
    reducer.begin(step)
    with pytest.raises(AssertionError, match=r"reducer\.run"), reducer.micro_batch(step.micro_batches[0]):
        pass


def test_a_batch_norm_of_another_class_is_refused_by_name() -> None:
    class MyNorm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(MyNorm(2)))
    with pytest.raises(ConfigError, match=r"cannot synchronize 1\.0, a MyNorm"):
        Reducer(model, HERE, synchronized=True)
