"""What a script does with its model during and after an exact loop."""

# ruff: noqa: PT012  # what raises is the body of a loop
from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import samebits
from samebits.errors import TrainError
from tests.unit.own_loop.loops import Loop, data_loader


def _trained() -> nn.Module:
    model: nn.Module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = samebits.exact(model, optimizer, data_loader(), global_batch=8, micro_batch=4)
    for batch in loader:
        inputs = batch[0]
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model


def test_a_model_can_be_saved_as_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(_trained())
    save_model(model, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_gradients_of_other_code_add_up_after_the_loop() -> None:
    model = _trained()
    model.zero_grad()
    first = next(model.parameters())
    model.eval()
    inputs = next(iter(data_loader()))[0]
    model(inputs).square().mean().backward()
    once = first.grad.clone()
    model(inputs).square().mean().backward()
    assert torch.allclose(first.grad, 2 * once)


def test_buffers_change_by_the_passes_before_a_backward_pass_only() -> None:
    def train(measures: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ExponentialLR(optimizer, 0.9)  # wraps optimizer.step
        model, optimizer, loader = samebits.exact(model, optimizer, data_loader(), global_batch=8, micro_batch=4)
        for batch in loader:
            optimizer.zero_grad()
            model(batch[0]).square().mean().backward()
            if measures:
                model(batch[0])  # in training mode
            optimizer.step()
        return model.state_dict()

    usual = train(measures=False)
    assert usual["0.num_batches_tracked"] == 2  # one for each of the two steps
    with pytest.warns(UserWarning, match="after the last backward pass of a loop's body change no buffers") as caught:
        measured = train(measures=True)
    assert {linecache.getline(each.filename, each.lineno).strip() for each in caught} == {"optimizer.step()"}
    assert all(torch.equal(measured[name], value) for name, value in usual.items())


@pytest.mark.parametrize("way", ["left out", "without a loss", "without a backward pass"])
def test_micro_batches_that_are_padding_train_as_the_others(way: str) -> None:
    loop = Loop()
    with pytest.raises(TrainError, match=r"trains differently if loader\.is_padding"):
        for batch in loop.loader:
            is_other = loop.loader.is_padding
            if is_other and way == "left out":
                continue
            loop.optimizer.zero_grad()
            loss = loop.loss(batch) * (0.0 if is_other else 1.0)
            if not is_other or way == "without a loss":
                loss.backward()
            loop.optimizer.step()
