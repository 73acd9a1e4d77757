"""Portable arithmetic has the same bits with a GPU's habits; torch's own arithmetic has others."""

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samebits.cluster.env import ALONE
from samebits.errors import ConfigError
from samebits.launch.start import join_world
from samebits.optim.build import Lamb
from samebits.portable import arithmetic
from samebits.portable.arithmetic import portable_arithmetic
from samebits.portable.mode import PortableMode
from tests.lab import portable_runs
from tests.ranks.recipes_in_ranks import carry_out
from tests.unit.portable.gpu_habits import GpuHabits, other_tiles
from tests.unit.portable.networks import KINDS, train
from tests.unit.portable.test_one_hash import FULL, RECORDED


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


class WithHabits(PortableMode):
    """Portable arithmetic of a processor with a GPU's habits, also in threads that are started later."""

    def __init__(self, *, lists: bool = False) -> None:
        super().__init__(lists=lists)
        self.habits = GpuHabits()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, *arguments: Any) -> Any:
        with self.habits:
            return super().__torch_dispatch__(*arguments)


AVERAGE = {"ema": 0.9, "clip_norm": 0.1}
# Each recipe, each optimizer, with and without clipping and the average of weights.
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("digits", {"name": "lamb", **AVERAGE}),
    ("mnist", {"name": "adamw", **AVERAGE}),
    ("classify", {"name": "sgd", "nesterov": True, **AVERAGE}),
    ("vit", {"name": "muon", "layer_decay": 0.8}),
    ("text", {"name": "adam", **AVERAGE}),
    ("pose", {"name": "adamw", "weight_decay": 0.1}),
    ("segment", {"name": "lamb", **AVERAGE}),
]
ONE = "vit"  # that is tried by `make test`; the others by `make test-full`


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "data"
    folder.mkdir()
    portable_runs.make_data(folder)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "optim"),
    [pytest.param(*run, id=f"{run[0]} by {run[1]['name']}", marks=[FULL] * (run[0] != ONE)) for run in RUNS],
)
@pytest.mark.one_in(3)
def test_recipes_keep_their_hashes(data: Path, tmp_path: Path, recipe: str, optim: dict[str, Any]) -> None:
    def trained(*, habits: bool, portable: bool) -> str:
        config = portable_runs.config_of(recipe, data, "portable" if portable else "auto")
        changes = {"max_steps": 3, "optim": config.optim.model_copy(update=optim)}
        config = config.model_copy(update=changes)
        model = portable_runs.tiny_vit if recipe == "vit" else None
        with ExitStack() as modes:
            if habits and portable:
                modes.enter_context(other_tiles())
                modes.enter_context(pytest.MonkeyPatch.context()).setattr(arithmetic, "PortableMode", WithHabits)
            elif habits:
                modes.enter_context(GpuHabits(draws=False))
            world = modes.enter_context(join_world(ALONE, config))
            return str(carry_out(world, tmp_path / f"{habits}-{portable}", config, model=model)[0])

    assert trained(habits=False, portable=True) == trained(habits=True, portable=True)
    # The engine computes the first micro-batch twice.
    with pytest.raises(ConfigError, match="the same micro-batch had other values"):
        trained(habits=True, portable=False)
