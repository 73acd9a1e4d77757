"""Local steps are refused with settings that they exclude, and by commands that do not know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from samebits.cli.main import run
from samebits.config.schema import RunConfig
from samebits.sweeps.prefixes import groups_of
from tests.runs import TINY


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "fast"}, "mode=fast"),
        ({"parallel": "fsdp"}, "parallel=fsdp"),
        ({"batch_norm": "sync"}, "batch_norm=sync"),
        ({"precision": "fp16"}, "precision=fp16"),
        ({"compile": True}, "compile=true"),
        ({"compress": "bf16"}, "compress=bf16"),
        ({"watch": {"recheck": "1/50"}}, "watch.recheck"),
        ({"record": {"content": True}}, "record.content=true"),
        ({"cluster": {"recovery": "in_step"}}, "cluster.recovery=in_step"),
        ({"cluster": {"load_balancing": True}}, "cluster.load_balancing=true"),
    ],
)
def test_local_steps_are_refused_with(values: dict[str, Any], words: str) -> None:
    given = {"recipe": "x", "sync": {"every": 8}, **values}
    with pytest.raises(ValidationError, match=f"sync.every=8 with sync.sites=2 cannot be combined with {words}; fix: "):
        RunConfig.model_validate(given)
    RunConfig.model_validate({**given, "sync": {"every": 1}})
    RunConfig.model_validate({**given, "sync": {"every": 8, "sites": 1}})


def test_each_site_needs_a_micro_batch() -> None:
    with pytest.raises(ValidationError, match=r"2 micro-batches, fewer than sync.sites=3; fix: Set micro_batch=21 or"):
        RunConfig.model_validate({"recipe": "x", "sync": {"every": 8, "sites": 3}})


@pytest.mark.parametrize(
    "command",
    [
        ["plan", TINY],
        ["simulate", TINY],
        ["scale", TINY],
        ["check", TINY],
        ["find", "lr", TINY],
    ],
    ids=lambda command: command[0],
)
def test_a_command_without_local_steps_refuses_them(
    command: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # `check` sets both, and its processes inherit them.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert run([*map(str, command), "sync.every=4"]) == 2
    text = capsys.readouterr().err
    name = " ".join(["samebits", command[0]])
    assert f"{name} does not support sync.every=4 with sync.sites=2" in " ".join(text.split())
    assert "Set sync.every=1" in text


def test_trials_with_local_steps_share_no_steps() -> None:
    values = {"recipe": "x", "max_steps": 5}
    configs = [RunConfig.model_validate({**values, "optim": {"lr": lr}}) for lr in (0.1, 0.2)]
    assert groups_of(configs) == [[0, 1]]
    local = [RunConfig.model_validate({**each.model_dump(), "sync": {"every": 2}}) for each in configs]
    assert groups_of(local) == []
