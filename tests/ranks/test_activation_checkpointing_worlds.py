"""Activation checkpointing changes no bit, in any world, and keeps less in memory."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from samebits.errors import ConfigError
from samebits.module.activation_checkpointing import checkpoint_activations
from tests.ranks.networks import WithBatchNorm
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import carry_out, settings


def test_it_changes_no_bit(pool: RankPool, tmp_path: Path) -> None:
    (plain,) = pool.run(1, carry_out, tmp_path / "plain", settings())
    twice = settings(activation_checkpointing=("layers",))
    for world in (1, 2):
        assert pool.run(world, carry_out, tmp_path / f"twice-{world}", twice) == [plain] * world


class Residual(nn.Module):
    """A block with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.layers(self.norm(inputs))


def kept_bytes(model: nn.Module) -> int:
    """What autograd keeps from a forward pass to the backward pass, the model's own tensors left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(torch.ones(32, 64))
    size = sum(seen.values())
    outputs.sum().backward()
    return size


def test_it_keeps_less_and_true_means_the_innermost_blocks() -> None:
    model = nn.Sequential(*[Residual() for _ in range(6)])
    before = kept_bytes(model)
    assert checkpoint_activations(model, True) == ["0", "1", "2", "3", "4", "5"]
    # Only the blocks' inputs are left; the hooks don't see them, as torch keeps them in a frame of its own.
    assert kept_bytes(model) < 0.3 * before


def test_what_names_no_module_is_refused_and_so_is_a_model_without_blocks() -> None:
    with pytest.raises(ConfigError, match=r"no module called layer9\.\*"):
        checkpoint_activations(WithBatchNorm(), ["layer9.*"])
    with pytest.raises(ConfigError, match="no blocks"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), True)


def test_a_pattern_means_what_is_called_not_the_list_that_holds_it() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([Residual(), Residual()])
    assert checkpoint_activations(model, ["stages*"]) == ["stages.0", "stages.1"]


def test_what_can_not_be_combined_is_refused() -> None:
    with pytest.raises(ValidationError, match="cannot be combined with batch_norm=sync"):
        settings(activation_checkpointing=True, batch_norm="sync")
