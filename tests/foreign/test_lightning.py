"""Lightning scripts in their usual and their exact form, and what a Trainer does with ExactStrategy."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import warm_start
from tests.foreign.cases import cases
from tests.foreign.forms import names, script
from tests.foreign.scripts import KILL_AT, Starter
from tests.runs import LONG_S, environment, kill_session, python

HERE = Path(__file__).parent
SCRIPTS = names("lightning")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="Lightning is not installed: pip install 'samebits[lightning]'",
)


def start(script: Path, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a script in a session of its own, without the variables of Slurm or torchrun."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), "--out", str(folder / "out"), *map(str, arguments)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def printed(process: subprocess.Popen[str]) -> dict[str, str]:
    """What a script prints in the end: steps, metrics and the hash of its weights."""
    try:
        out, err = process.communicate(timeout=2 * LONG_S)
    finally:
        kill_session(process)
    assert process.returncode == 0, f"{out}\n{err}"
    found = dict(re.findall(r"(steps|val_acc|val_loss|test_dice|sha256) (\S+)", out))
    assert "sha256" in found, f"{out}\n{err}"
    return found


@cache
def alone(name: str, scratch: Path) -> dict[str, str]:
    """What the exact form of a script prints with one process."""
    folder = scratch / f"alone-{name}"
    folder.mkdir(exist_ok=True)
    return printed(start(script(name, "exact", folder), folder, "--devices", 1))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def found(scratch: Path) -> dict[str, Any]:
    """What `lightning_cases.py` found."""
    process = warm_start.popen(
        [sys.executable, HERE / "lightning_cases.py", scratch], cwd=scratch, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=2 * LONG_S)
    finally:
        kill_session(process)
    assert process.returncode == 0, f"{out}\n{err}"
    found: dict[str, Any] = json.loads((scratch / "found.json").read_text())
    return found


def test_weights_are_equal_at_one_and_two_processes(found: dict[str, Any]) -> None:
    assert found["two"]["hash"] == found["one"]["hash"]
    assert found["two limited"]["hash"] == found["one limited"]["hash"] != found["one"]["hash"]


def test_logged_values_and_torchmetrics_are_equal_at_one_and_two_processes(found: dict[str, Any]) -> None:
    # With 4 batches in the first validation loader and 1 in the second, which rank 1 has no part of.
    assert found["two"]["metrics"] == found["one"]["metrics"]
    assert found["two limited"]["metrics"] == found["one limited"]["metrics"]
    assert found["one"]["metrics"]["num_val/dataloader_idx_0"] == 13


def test_limits_count_steps_and_whole_batches(found: dict[str, Any]) -> None:
    limited = found["one limited"]
    assert limited["steps"] == 4  # 2 of each epoch, and early stopping after the second
    assert limited["metrics"]["num"] == 16  # samples of a step
    assert limited["metrics"]["num_val"] == 8  # two batches of four, over all ranks


def test_a_resume_from_any_step_at_another_number_of_processes_ends_with_equal_weights(found: dict[str, Any]) -> None:
    # The checkpoints were written by two processes, the resume has one.
    for step, resumed in found["resumed"].items():
        assert resumed["hash"] == found["one"]["hash"], step
        assert resumed["steps"] == found["one"]["steps"]
        assert resumed["seen"] == found["one"]["seen"][int(step) :]


def test_a_checkpoint_of_another_run_is_refused(found: dict[str, Any]) -> None:
    kind, text = found["other seed"]
    assert kind == "CheckpointError"
    assert "seed: 0 there, 1 here" in text


def test_lightning_counts_optimizer_steps(found: dict[str, Any]) -> None:
    seen = found["one"]["seen"]  # batch_idx, global_step, learning rate after the scheduler, loss
    assert [batch_idx for batch_idx, *_ in seen] == 3 * [0, 1, 2]
    assert [global_step for _, global_step, *_ in seen] == list(range(1, 10))
    # LinearLR over trainer.estimated_stepping_batches ends at a tenth of the first rate.
    assert seen[-1][2] == pytest.approx(0.01)
    assert found["max_steps"]["steps"] == 4


def test_clipping_and_precision_change_the_result(found: dict[str, Any]) -> None:
    assert len({found[name]["hash"] for name in ("one", "clipped", "bf16")}) == 3


def test_a_gradient_scaler_leaves_out_the_same_steps_at_one_and_two_processes(found: dict[str, Any]) -> None:
    assert found["two fp16"]["hash"] == found["one fp16"]["hash"] != found["one"]["hash"]
    rates = [rate for *_, rate, _ in found["one fp16"]["seen"]]
    assert rates == [rate for *_, rate, _ in found["one"]["seen"]]


@pytest.mark.parametrize("case", ["one", "two limited", "max_steps", "one fp16"])
def test_the_hook_before_zero_grad_counts_steps_and_not_micro_batches(found: dict[str, Any], case: str) -> None:
    assert found[case]["num_zeroed"] == found[case]["steps"]


def test_a_model_is_tested_on_each_sample_once(found: dict[str, Any]) -> None:
    assert found["tested"]["num_val"] == 13


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("accumulation", "accumulate_grad_batches is 2"), ("averaging", "StochasticWeightAveraging"),
        ("sync_batchnorm", "sync_batchnorm=True"), ("sync layer", "SyncBatchNorm"), ("precision", "bf16-true"),
        ("sampler", "WeightedRandomSampler"), ("loaders", "2 training dataloaders"),
        ("closure", "called the closure itself"), ("no loss", "training_step() returned None"),
        ("no loss in some", "training_step() returned None"), ("one sample", "a micro-batch of one sample"),
        ("option", "find_unused_parameters"),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused_by_name(found: dict[str, Any], case: str, text: str) -> None:
    kind, message = found["refused"][case]
    assert kind == "ConfigError"
    assert text in message
    assert "fix" in message


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("teacher", "BatchNorm1d, in training mode, changes its running statistics in the loop"),
        ("second loader", "the loop reads a second DataLoader in each micro-batch"),
    ],
)
def test_what_differs_by_the_processes_is_named_in_training(found: dict[str, Any], case: str, text: str) -> None:
    kind, message = found["refused"][case]
    assert kind == "TrainError"
    assert text in message
    assert "lightning_cases.py:" in message


@pytest.mark.lab
@pytest.mark.parametrize("procs", [2, 3, 4])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_the_same_in_any_world(name: str, procs: int, scratch: Path, tmp_path: Path) -> None:
    assert printed(start(script(name, "exact", tmp_path), tmp_path, "--devices", procs)) == alone(name, scratch)


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    # Each process would import Lightning for seven seconds.
    with Starter("samebits.integrations.lightning", "sklearn.datasets", "torchvision") as starter:
        yield starter


@pytest.mark.parametrize("name", cases(SCRIPTS))
def test_a_killed_script_resumes_on_another_number_of_processes(name: str, starter: Starter, tmp_path: Path) -> None:
    file = [script(name, "exact", tmp_path)]
    whole = starter.run_files(file, 1, "--out", tmp_path / "whole", "--devices", 1)
    killed = starter.run_files(file, 2, "--out", tmp_path / "out", "--devices", 2, kill_at=KILL_AT[name])
    assert killed.codes[-1] == -signal.SIGKILL
    assert (tmp_path / "out" / "last.ckpt").exists()
    assert starter.run_files(file, 3, "--out", tmp_path / "out", "--devices", 3).sha256 == whole.sha256


@pytest.mark.lab
def test_the_usual_form_depends_on_the_number_of_processes(tmp_path: Path) -> None:
    hashes = set()
    for procs in (1, 2):
        folder = tmp_path / str(procs)
        folder.mkdir()
        usual = script("lightning_cnn", "usual", folder)
        hashes.add(printed(start(usual, folder, "--devices", procs))["sha256"])
    assert len(hashes) == 2


@pytest.mark.full
def test_options_that_lightning_cli_fills_in_are_accepted() -> None:
    # With their defaults, those of DDPStrategy and of DistributedDataParallel.
    lines = [
        "import inspect",
        "from lightning.pytorch.strategies import DDPStrategy",
        "from torch.nn.parallel import DistributedDataParallel",
        "from samebits.integrations.lightning import ExactStrategy",
        "kinds = (DistributedDataParallel, DDPStrategy)",
        "known = {name: each for kind in kinds for name, each in inspect.signature(kind).parameters.items()}",
        "left_out = {'module', 'device_ids', 'kwargs'}",
        "ExactStrategy(global_batch=4, **{n: p.default for n, p in known.items() if n not in left_out})",
    ]
    python("-c", "\n".join(lines))
