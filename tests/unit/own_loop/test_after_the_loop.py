"""What a script does with its model during and after an exact loop."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_model
from torch import nn

import lockstep
from tests.unit.own_loop.loops import data_loader


def _trained() -> nn.Module:
    model: nn.Module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = lockstep.exact(model, optimizer, data_loader(), global_batch=8, micro_batch=4)
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
    assert first.grad is not None
    once = first.grad.clone()
    model(inputs).square().mean().backward()
    assert torch.allclose(first.grad, 2 * once)
