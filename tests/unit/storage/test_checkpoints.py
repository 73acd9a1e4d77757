"""Checkpoints come back as they went, and only the right ones stay."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samebits.config.schema import OptimConfig
from samebits.errors import CheckpointError
from samebits.optim.build import load_state, optimizer
from samebits.storage import checkpoint
from samebits.storage.checkpoint import Checkpoint, load_checkpoint, newest, prune, save, steps
from samebits.storage.weights import load_into, weights_of, weights_sha256


def small(step: int, value: float = 0.5) -> Checkpoint:
    """A checkpoint with the least that one has."""
    return Checkpoint(step, {"w": torch.full((3,), value)}, {"state": {}, "param_groups": []}, {"step": step})


def train(model: nn.Module, made: torch.optim.Optimizer, num_steps: int, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for _ in range(num_steps):
        made.zero_grad()
        model(torch.randn(8, 3, 6, 6)).square().mean().backward()
        made.step()


def network() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    return net.to(memory_format=torch.channels_last)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and bool(torch.equal(one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(same(left, right) for left, right in zip(one, two, strict=True))
    return bool(one == two)


@pytest.mark.parametrize(
    "config",
    [
        {"name": "sgd", "momentum": 0.9, "nesterov": True},
        {"name": "sgd", "momentum": 0.0},
        {"name": "adam"},
        {"name": "adamw", "weight_decay": 0.01},
    ],
)
def test_a_checkpoint_comes_back_and_training_resumes_to_the_same_bits(tmp_path: Path, config: dict[str, Any]) -> None:
    model = network()
    made = optimizer(model, OptimConfig(**config))
    train(model, made, 3)
    state = {"step": 3, "metrics": {"top1": 0.1 + 0.2}, "best": None, "skipped": [2]}
    path = save(Checkpoint(3, model.state_dict(), made.state_dict(), state), tmp_path)
    assert path.name == "step-000003"

    back = load_checkpoint(path)
    assert (back.step, back.state) == (3, state)
    assert same(dict(model.state_dict()), back.weights)
    assert same(made.state_dict()["state"], back.optimizer["state"])
    resumed = network()
    other = optimizer(resumed, OptimConfig(**config))
    load_into(resumed, back.weights, path)
    load_state(other, back.optimizer)
    train(model, made, 3, seed=7)
    train(resumed, other, 3, seed=7)
    assert weights_sha256(model.state_dict()) == weights_sha256(resumed.state_dict())


def test_no_file_of_a_checkpoint_can_run_code(tmp_path: Path) -> None:
    path = save(small(1), tmp_path)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}


def test_shared_weights_come_back_under_both_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    back = load_checkpoint(save(Checkpoint(1, model.state_dict(), {"state": {}, "param_groups": []}), tmp_path))
    assert back.weights.keys() == model.state_dict().keys()
    assert torch.equal(back.weights["0.weight"], back.weights["1.weight"])


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(small(4, 1.0), tmp_path)
    save(small(4, 2.0), tmp_path)
    assert os.listdir(tmp_path) == ["step-000004"]
    assert load_checkpoint(tmp_path / "step-000004").weights["w"].tolist() == [2.0] * 3


def test_checkpoints_are_found_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        save(small(step), tmp_path)
    (tmp_path / "step-old").mkdir()
    (tmp_path / "step-000007").write_text("a file")
    assert steps(tmp_path) == [5, 999_999, 1_000_000]
    assert [found.step for _, found in newest(tmp_path) if isinstance(found, Checkpoint)] == [1_000_000, 999_999, 5]


@pytest.mark.parametrize(
    ("keep", "best", "stay"),
    [(1, None, [50]), (2, 10, [10, 40, 50]), (3, 50, [30, 40, 50]), (9, None, [10, 20, 30, 40, 50])],
)
def test_the_newest_and_the_best_stay(tmp_path: Path, keep: int, best: int | None, stay: list[int]) -> None:
    for step in (10, 20, 30, 40, 50):
        save(small(step), tmp_path)
    prune(tmp_path, 50, keep, lambda step: step == best)
    assert steps(tmp_path) == stay


def test_a_truncated_newer_checkpoint_does_not_remove_an_intact_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(small(step), tmp_path)
    (tmp_path / "step-000030" / "state.json").write_text("{")
    # The run went on from 20, and has come to 25.
    save(small(25), tmp_path)
    prune(tmp_path, 25, 1, lambda _: False)
    whole = [found.step for _, found in newest(tmp_path) if isinstance(found, Checkpoint)]
    assert whole == [25]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    save(small(1), tmp_path)
    for name in (".step-000002.77.partial", ".step-000001.78.partial-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(b"half")
    checkpoint.clean(tmp_path)
    assert os.listdir(tmp_path) == ["step-000001"]


def test_weights_are_found_by_last_best_and_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (1, 2, 3):
        save(small(step, float(step)), folder)
    checkpoint.mark_best(folder, {"step": 2, "metric": "top1", "value": 0.9})
    found = {which: weights_of(tmp_path, which) for which in ("last", "best", "step-000001")}
    assert {which: weights["w"][0].item() for which, (_, weights) in found.items()} == {
        "last": 3.0, "best": 2.0, "step-000001": 1.0,
    }  # fmt: skip
    (folder / "step-000003" / "weights.safetensors").unlink()
    assert weights_of(tmp_path, "last")[1]["w"][0].item() == 2.0


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with pytest.raises(CheckpointError, match="no weights and no whole checkpoint yet"):
        weights_of(tmp_path, "last")
    save(small(2), folder)
    with pytest.raises(CheckpointError) as caught:
        weights_of(tmp_path, "step-000009")
    assert "has no checkpoint step-000009" in str(caught.value)
    assert "last, best, step-000002" in str(caught.value)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = save(small(1), tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match=r"has checkpoint format 99(.|\n)*allowed  format 1"):
        load_checkpoint(path)
