import pytest
import torch
from torch import nn

from samebits.module.ema import ModelEma


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
