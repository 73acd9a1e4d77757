"""The reducer in one process, and a model's buffers: nothing of a step leaks into the next."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

from samebits.cluster.world import alone
from samebits.data.order import Order, Step
from samebits.errors import ConfigError
from samebits.parallel.bucket import Bucket
from samebits.parallel.reduce import Reducer
from samebits.parallel.running import RunningBuffers


def first_step(num_samples: int = 8, micro_batch: int = 4) -> Step:
    return next(iter(Order(num_samples, num_samples, micro_batch).steps(alone("cpu"), stop=1)))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_backward_twice_in_one_micro_batch_is_caught() -> None:
    model = nn.Linear(2, 1)
    reducer = Reducer(model, alone("cpu"))
    step = first_step()
    reducer.begin(step)
    with reducer.micro_batch(step.micro_batches[0]):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="got its gradient twice"):
            model(torch.ones(1, 2)).sum().backward()


def test_a_backward_pass_outside_of_a_step_goes_as_without_a_reducer() -> None:
    model = nn.Linear(2, 1)
    Reducer(model, alone("cpu"))
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_a_step_that_broke_off_leaves_nothing_in_the_next() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    reducer = Reducer(model, alone("cpu"))
    step = first_step()
    inputs = torch.randn(8, 3)

    def whole() -> list[Tensor]:
        reducer.begin(step)
        for micro in step.micro_batches:
            with reducer.micro_batch(micro):
                reducer.backward(model(inputs[micro.indices]).square().mean())
        reducer.reduce()
        found = gradients(model)
        reducer.undo_buffers()
        return found

    expected = whole()
    reducer.begin(step)
    with contextlib.suppress(ZeroDivisionError), reducer.micro_batch(step.micro_batches[0]):
        model(inputs).square().mean().backward()
        _ = 1 / 0
    reducer.undo_buffers()
    assert all(torch.equal(one, two) for one, two in zip(whole(), expected, strict=True))


def test_the_gradient_is_scaled_and_its_norm_is_of_before() -> None:
    model = nn.Linear(2, 1, bias=False)
    reducer = Reducer(model, alone("cpu"), num_extras=2)
    step = first_step(4, 4)
    reducer.begin(step)
    with reducer.micro_batch(step.micro_batches[0]):
        reducer.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum(), torch.tensor([7.0, 8.0]))
    reducer.reduce(flag=1.0)
    assert (reducer.norm, reducer.flag, reducer.extras) == (5.0, 1.0, [7.0, 8.0])
    reducer.scale(0.5)
    assert model.weight.grad.tolist() == [[1.5, 2.0]]


def test_dropout_follows_from_the_micro_batch_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5))
    reducer = Reducer(model, alone("cpu"))
    step = first_step(8, 2)
    masks = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        reducer.begin(step)
        for micro in reversed(step.micro_batches):
            with reducer.micro_batch(micro):
                masks.append((micro.index, model(torch.ones(2, 3)).eq(0)))
    half = len(masks) // 2
    assert all(torch.equal(one, two) for (_, one), (_, two) in zip(masks[:half], masks[half:], strict=True))
    assert not torch.equal(masks[0][1], masks[1][1])


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_gradients_that_are_moved_together_have_the_same_bits(
    loss_scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, found = torch.randn(12, 3), []
    for together in (False, True):  # True: as on a GPU
        # A property takes the place of the attribute, whatever the device.
        monkeypatch.setattr(
            Bucket, "moves_together", property(lambda _, it=together: it, lambda *_: None), raising=False
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
        reducer, step = Reducer(model, alone("cpu")), first_step(12)
        reducer.begin(step, loss_scale)
        for micro in step.micro_batches:
            with reducer.micro_batch(micro):
                reducer.backward(model(inputs[micro.indices]).square().mean())
        reducer.reduce()
        found.append(gradients(model))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Counting(nn.Module):
    """Buffers of many kinds; the forward pass changes all but the mask."""

    averaged_buffers = ("mean", "calls", "small_calls", "hidden")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("small_calls", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, value: float) -> None:
        self.mean += value
        self.calls += 1
        self.small_calls += 2
        self.hidden -= value

    def values(self) -> list[Tensor]:
        return [self.mean.clone(), self.calls.clone(), self.small_calls.clone(), self.mask.clone(), self.hidden.clone()]


def test_every_micro_batch_starts_from_the_steps_values_and_the_mean_change_is_applied() -> None:
    model = Counting()
    buffers = RunningBuffers(model)
    before = model.values()
    buffers.start_step()
    total = torch.zeros(len(buffers))
    for value, weight in [(1.0, 0.25), (5.0, 0.75)]:
        model(value)
        total += weight * buffers.take_change()
        assert all(torch.equal(now, then) for now, then in zip(model.values(), before, strict=True))
    buffers.apply(total)
    assert model.mean.tolist() == [5.0, 5.0, 5.0]
    assert model.hidden.tolist() == [-4.0]
    assert model.calls.item() == 1
    assert model.small_calls.tolist() == [2, 2]
    assert model.small_calls.dtype == torch.int32
    assert model.mask.tolist() == [True, False]


def test_a_step_is_undone() -> None:
    model = Counting()
    buffers = RunningBuffers(model)
    before = model.values()
    buffers.start_step()
    model(3.0)
    buffers.apply(buffers.take_change())
    assert not torch.equal(model.mean, before[0])
    buffers.reset()
    assert all(torch.equal(now, then) for now, then in zip(model.values(), before, strict=True))


def test_batch_norm_counts_steps_and_averages_statistics() -> None:
    torch.manual_seed(0)
    model, alike = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    buffers = RunningBuffers(model)
    inputs = torch.randn(6, 4)
    buffers.start_step()
    total = torch.zeros(len(buffers))
    for half in inputs.split(3):
        model(half)
        total += 0.5 * buffers.take_change()
    buffers.apply(total)
    means = torch.stack([half.mean(0) for half in inputs.split(3)])
    assert model.num_batches_tracked.item() == 1
    torch.testing.assert_close(model.running_mean, 0.1 * means.mean(0))
    assert model.state_dict().keys() == alike.state_dict().keys()


def test_a_model_without_buffers_has_nothing_to_sum() -> None:
    buffers = RunningBuffers(nn.Linear(2, 2))
    buffers.start_step()
    assert len(buffers) == 0
    assert buffers.take_change().shape == (0,)


def test_a_buffer_that_is_replaced_is_named() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

        def forward(self) -> None:
            self.total = self.total + 1

    model = nn.Sequential(Replacing())
    buffers = RunningBuffers(model)
    model[0]()
    with pytest.raises(ConfigError, match=r"replaced buffer 0\.total"):
        buffers.take_change()


def test_a_buffer_in_half_precision_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("scale", torch.ones(1, dtype=torch.float16))
    with pytest.raises(ConfigError, match=r"buffer 0\.scale is torch\.float16"):
        RunningBuffers(model)
