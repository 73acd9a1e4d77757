"""`samebits check SCRIPT`: a script with its own exact loop, and scripts with a planted fault."""

import json
from pathlib import Path

import pytest

from samebits.own_loop.scripts import is_script
from tests.runs import ROOT, TINY, samebits

SCRIPT = """
import random
import sys
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


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        pytest.param("pass", "", marks=pytest.mark.full),
        pytest.param(
            "x = x * (1 + 0.1 * (count % 2))", "the loop depends on the number of processes", marks=pytest.mark.lab
        ),
        pytest.param("x = x + OWN.random()", "another source of randomness", marks=pytest.mark.full),
        pytest.param(
            "teacher.weight.data.mul_(0.9)", "the loop depends on the number of processes", marks=pytest.mark.full
        ),
        pytest.param(
            "if count > 8: sys.exit(0)",
            "the number of steps depends on the number of processes",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_script_is_checked_and_its_fault_is_named(tmp_path: Path, fault: str, kind: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("# PLANTED", fault))
    done = samebits("check", script, "--json", cwd=tmp_path, code=1 if kind else 0)
    report = json.loads(done.stdout)
    assert [finding["kind"] for finding in report["findings"]][:1] == ([kind] if kind else [])
    assert report["exact"] is not bool(kind)
    if not kind:
        assert report["ok"][-2:] == ["2 processes", "3 processes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_batch_that_the_script_divides_by_the_processes_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n" + SCRIPT.replace("global_batch=24", "global_batch=24 // int(os.environ['WORLD_SIZE'])")
    )
    (finding, *_) = json.loads(samebits("check", script, "--json", cwd=tmp_path, code=1).stdout)["findings"]
    assert finding["what"] == "global_batch is 24 on 1 process and 12 on 2 processes"


@pytest.mark.full
def test_a_script_without_an_exact_loop_is_told_apart_from_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    assert "has no exact loop and is no recipe" in samebits("check", "train.py", cwd=tmp_path, code=2).stderr


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_script_that_makes_its_process_group_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GROUP + SCRIPT.replace("4, shuffle=True", "4, sampler=DistributedSampler(data)"))
    report = json.loads(samebits("check", script, "--json", cwd=tmp_path).stdout)
    assert report["exact"]
    assert report["ok"][-2:] == ["2 processes", "3 processes"]


@pytest.mark.parametrize("group", ["", GROUP])
def test_a_script_that_fails_is_reported_with_its_last_lines(tmp_path: Path, group: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(group + "import samebits\nif False:\n    samebits.exact()\nraise SystemExit('no data here')\n")
    done = samebits("check", script, cwd=tmp_path, code=2)
    assert "failed, or made no exact step, on 1 process (exit code 1)" in done.stderr
    assert "no data here" in done.stderr


def test_a_recipe_file_is_no_script() -> None:
    assert not is_script(str(TINY))
    assert not is_script(str(ROOT / "examples" / "own_recipe.py"))
    assert not is_script("digits")
