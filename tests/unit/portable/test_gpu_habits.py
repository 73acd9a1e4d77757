"""Portable arithmetic has the same bits with a GPU's habits; torch's own arithmetic has others."""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from samebits.optim.build import Lamb
from samebits.portable.arithmetic import portable_arithmetic
from tests.unit.portable.gpu_habits import GpuHabits, other_tiles
from tests.unit.portable.networks import KINDS, train
from tests.unit.portable.test_one_hash import RECORDED


def computed(compute: Callable[[], str], *, habits: bool, portable: bool = True) -> str:
    with ExitStack() as modes:
        if habits:
            modes.enter_context(GpuHabits(draws=portable))
            modes.enter_context(other_tiles())
        if portable:
            modes.enter_context(portable_arithmetic())
        return compute()


@pytest.mark.parametrize("kind", KINDS)
def test_networks_keep_their_hashes(kind: str) -> None:
    assert f"{kind} {computed(lambda: train(kind), habits=True)}" in RECORDED.splitlines()
    usual, other = (computed(lambda: train(kind), habits=habits, portable=False) for habits in (False, True))
    assert usual != other


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01, foreach=False),
    "LAMB": lambda p: Lamb(p, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
}


def with_clipping_and_average(name: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))
    optimizer = OPTIMIZERS[name](model.parameters())
    x = torch.randn(13, 6)
    for _ in range(4):
        optimizer.zero_grad()
        (model(x).square().mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
        average.update_parameters(model)
    values: list[Tensor] = [*model.parameters(), *average.module.parameters()]
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in values)).hexdigest()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_clipping_and_averages_keep_their_bits(name: str) -> None:
    usual, other = (computed(lambda: with_clipping_and_average(name), habits=habits) for habits in (False, True))
    assert usual == other
    torchs, others = (
        computed(lambda: with_clipping_and_average(name), habits=habits, portable=False) for habits in (False, True)
    )
    assert torchs != others
