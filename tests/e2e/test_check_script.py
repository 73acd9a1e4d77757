"""`samebits check SCRIPT`: a script with its own exact loop, and scripts with a planted fault."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.main import run
from samebits.errors import ConfigError
from samebits.own_loop.text import is_script
from samebits.replay import check_script
from samebits.replay.check_script import ScriptOutcome, _compare
from samebits.replay.trace import MicroTrace, StepTrace, Trace
from tests.runs import ROOT, TINY, samebits

FIRST, AGAIN, TWO, _ = check_script._WORLDS
SCRIPT = """
import random
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import samebits

OWN = random.Random()
torch.manual_seed(0)
data = TensorDataset(torch.randn(60, 5), torch.randint(0, 3, (60,)))
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
teacher = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model, optimizer, loader = samebits.exact(
    model, optimizer, DataLoader(data, 4, shuffle=True), global_batch=24, per_step=[scheduler]
)
count = 0
for epoch in range(4):
    for x, y in loader:
        count += 1
        # PLANTED
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
"""

GROUP = """
import torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
"""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command with the first world and some of the others, each of which is a torchrun that imports torch."""

    def check_in(worlds: tuple[Any, ...], script: Path, code: int) -> Any:
        monkeypatch.setattr(check_script, "_WORLDS", (FIRST, *worlds))
        # The command sets both for its process, which here is that of the tests.
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        assert run(["check", str(script), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return check_in


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "world", "kind"),
    [
        ("teacher.weight.data.mul_(1 + 1e-3 * OWN.random())", AGAIN, "another source of randomness"),
        ("teacher.weight.data.mul_(0.9)", TWO, "the loop depends on the number of processes"),
    ],
)
def test_a_script_is_checked_and_its_fault_is_named(
    tmp_path: Path, check: Callable[..., Any], fault: str, world: Any, kind: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("# PLANTED", fault))
    report = check((world,), script, code=1)
    assert report["findings"][0]["kind"] == kind
    assert not report["exact"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.full
def test_a_batch_changed_by_a_generator_of_the_script_ends_the_script_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("# PLANTED", "x = x + OWN.random()"))
    done = samebits("check", "train.py", cwd=tmp_path, code=2)
    assert "gives another gradient when it is repeated" in done.stderr
    assert "a random generator of its own" in done.stderr


@pytest.mark.full
def test_a_script_without_an_exact_loop_is_told_apart_from_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    assert "has no exact loop and is no recipe" in samebits("check", "train.py", cwd=tmp_path, code=2).stderr


@pytest.mark.full
def test_a_script_that_makes_its_process_group_is_checked(tmp_path: Path, check: Callable[..., Any]) -> None:
    script = tmp_path / "train.py"
    script.write_text(GROUP + SCRIPT.replace("4, shuffle=True", "4, sampler=DistributedSampler(data)"))
    report = check((TWO,), script, code=0)
    assert report["exact"]
    assert report["ok"][-1] == "2 processes"


@pytest.mark.parametrize(
    ("settings", "num_steps", "samples", "kind"),
    [
        (24, 3, "s", ""),
        (12, 3, "s", "an argument of exact() depends on the number of processes"),
        (24, 2, "s", "the number of steps depends on the number of processes"),
        (24, 3, "t", "samples depend on the process"),
    ],
)
def test_what_differs_on_two_processes_is_named(settings: int, num_steps: int, samples: str, kind: str) -> None:
    def outcome(settings: int, num_steps: int, samples: str) -> ScriptOutcome:
        steps = {
            str(step): StepTrace({"0": MicroTrace({"7": samples})}, weights={"weight": str(step)})
            for step in range(num_steps)
        }
        return ScriptOutcome(Trace(steps=steps), {"global_batch": settings})

    found = _compare(outcome(24, 3, "s"), outcome(settings, num_steps, samples), TWO)
    assert (found.kind if found else "") == kind
    assert found is None or found.what.endswith("2 processes")


def test_a_script_that_fails_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GROUP + "import samebits\nif False:\n    samebits.exact()\nraise SystemExit('no data here')\n")
    done = samebits("check", script, cwd=tmp_path, code=2)
    assert "on 1 process failed, or made no exact step (exit code 1)" in done.stderr
    assert "no data here" in done.stderr


def test_a_recipe_file_is_no_script() -> None:
    assert not is_script(str(TINY))
    assert not is_script(str(ROOT / "examples" / "own_recipe.py"))
    assert not is_script("digits")


@pytest.mark.parametrize("use", ["metric = ExactMatch()", "exact_sum(x)", "from base import *"])
def test_a_recipe_file_without_a_loop_is_no_script(tmp_path: Path, use: str) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"import samebits\ndef build(config, info):\n    {'pass' if 'import' in use else use}\n{use}\n")
    assert not is_script(str(recipe))


@pytest.mark.parametrize("build", ["def build():", "def build(width):", "class TrainConfig: ...\ndef build(config):"])
def test_a_script_with_a_function_named_build_is_no_recipe(tmp_path: Path, build: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import samebits\n{build}\n    pass\nsamebits.exact(build())\n")
    assert is_script(str(script))


@pytest.mark.parametrize("call", ["samebits.exact(net)", "class T(ExactTrainer): ...", "def build(): pass\nexact(net)"])
def test_an_exact_loop_is_refused_as_ranks(tmp_path: Path, call: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import samebits\n{call}\n")
    with pytest.raises(ConfigError, match="has an exact loop, which is not observed as 2 ranks") as caught:
        is_script(str(script), 2)
    assert caught.value.slots["fix"].startswith("Leave out --as")
    assert is_script(str(script))


@pytest.mark.parametrize(("ranks", "text"), [(None, "samebits.exact("), (2, "samebits.exact("), (2, "x = (")])
def test_a_script_that_python_cannot_read_is_run_and_shows_its_own_error(
    tmp_path: Path, ranks: int | None, text: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    assert is_script(str(tmp_path / "train.py"), ranks)


MENTIONS = "import samebits\n# as ExactTrainer does\nprint('samebits.exact(model)')"


@pytest.mark.parametrize(
    "text", ["exact(prediction, answer)", "from torchtune import Config\ndef build(config): pass", MENTIONS]
)
def test_other_scripts_run_as_ranks(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert is_script(str(tmp_path / "train.py"), 2)
    assert is_script("no_such_script.py", 2)  # named by the launcher
