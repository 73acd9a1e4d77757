"""What a run's statement does not list, or states otherwise, is found."""

import contextlib
import io
import json
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.main import run as run_command
from samebits.provenance.run_files import RunFiles
from samebits.replay.record_files import check_files
from samebits.replay.segments import _first_difference
from samebits.replay.verify import lines
from samebits.storage.manifest import WEIGHTS
from tests.verify_trials.forgery import (
    edit_evaluation,
    edit_steps,
    edit_tensors,
    forge,
)
from tests.verify_trials.honest import RESUMED, resumed_with
from tests.verify_trials.runs import alone, prepare_process, train, train_in, train_until, verified


@pytest.mark.parametrize("kind", ["code", "data"])
def test_a_digest_under_an_invented_name_is_named(run: Path, kind: str) -> None:
    entry = {"training sample of a stranger": "0" * 16}
    forge(run, **{kind: [entry] if kind == "code" else entry})
    if kind == "code":
        (run / "environment.json").unlink()
    notes = verified(run, steps=(0, 4)).notes
    assert "not compared: training sample of a stranger, which this replay does not have" in notes
    assert any(note.startswith("not stated: ") for note in notes)


@pytest.mark.parametrize(
    "record",
    [
        lambda number: {"kind": "eval", "step": 20, "epoch": 4, "top1": 0.5},
        lambda number: {"kind": "eval", "step": number, "epoch": 4, "top1": 0.5},
        lambda number: {"kind": "train", "step": 1000 + number, "epoch": 4, "loss": 0.5},
    ],
    ids=["one step", "many steps", "training"],
)
def test_the_records_of_a_run_are_compared_without_keeping_them(run: Path, record: Callable[[int], Any]) -> None:
    check_files(RunFiles(run))  # imports
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(record(number))}\n" for number in range(20_000))
    tracemalloc.start()
    try:
        check_files(RunFiles(run))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000, f"{peak:,} bytes"


@pytest.mark.parametrize("step", [4, 8, 16])
def test_from_scratch_compares_the_checkpoints_that_it_does_not_need(run: Path, step: int) -> None:
    weights = run / "checkpoints" / f"step-{step:06d}" / WEIGHTS
    edit_tensors(weights, lambda tensors: [each.add_(0.5) for each in tensors.values() if each.is_floating_point()])
    forge(run)
    verdict = verified(run, from_scratch=True)
    assert [each.step for each in verdict.differences] == [step], lines(verdict)
    # The replay has gone on from its own weights.
    assert sum(each.num_steps for each in verdict.replayed) == 16


def test_from_scratch_ends_at_a_step_that_differs(run: Path) -> None:
    shutil.rmtree(run)
    train(run, ("optim.lr=0.04",))
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("lr: 0.04", "lr: 0.05"))
    forge(run)
    assert not verified(run, from_scratch=True).is_verified


@pytest.mark.parametrize(
    "setting", [each if "record" in each else pytest.param(each, marks=pytest.mark.full) for each in RESUMED]
)
@pytest.mark.one_in(3)
def test_an_honest_run_that_is_resumed_with_another_setting_is_verified(tmp_path: Path, setting: str) -> None:
    prepare_process()
    verdict = resumed_with(setting, tmp_path / "run")
    assert verdict.is_verified, lines(verdict)
    assert verdict.share == 1


@pytest.mark.parametrize("step", [9, 12, 19])
def test_a_digest_that_is_recorded_from_a_resume_on_is_compared(tmp_path: Path, step: int) -> None:
    prepare_process()
    run = tmp_path / "run"
    resumed_with("record.content=true", run)
    edit_steps(run, step, lambda record: replace(record, content=b"7" * 16))
    forge(run)
    assert [(each.step, each.name) for each in verified(run).differences] == [(step, "samples' values")]


@pytest.mark.parametrize("sizes", [(7, None), (None, 7), (7, 3)])
def test_an_honest_run_with_another_eval_batch_after_a_stop_is_verified(
    tmp_path: Path, sizes: tuple[int | None, int | None]
) -> None:
    """The last digits of a validation's loss follow from it, and it may change at a resume."""
    prepare_process()
    run = tmp_path / "run"
    options = [() if size is None else (f"eval_batch={size}",) for size in sizes]
    train(run, options[0])
    for name in ("result.json", "provenance.json", WEIGHTS):
        (run / name).unlink()
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 8:
            shutil.rmtree(path)
    train(run, options[1], resume="auto")
    verdict = verified(run)
    assert verdict.is_verified, lines(verdict)
    worlds = json.loads((run / "environment.json").read_text())["worlds"]
    assert [each["eval_batch"] for each in worlds] == [size or 10 for size in sizes]


@pytest.mark.parametrize(
    ("stated", "found", "text"),
    [
        ({"a": ["1", "2"]}, {"a": ["1", "2"]}, ""),
        ({"cat": ["cat/1", "dog/1"]}, {"cat": ["cat/1", "cat/2"]}, "train.cat[1] is 'dog/1', and 'cat/2' in the data"),
        ({"cat": ["1"], "dog": []}, {"cat": ["1"], "dog": ["2"]}, "train.dog has 0 entries, and 1 in the data here"),
        (["cat"], ["dog"], "train[0] is 'cat', and 'dog' in the data here"),
        (None, {"sha256": "ab"}, "train is None, and {'sha256': 'ab'} in the data here"),
    ],
)
def test_the_first_entry_of_a_listing_that_differs_is_named(stated: Any, found: Any, text: str) -> None:
    assert _first_difference("train", stated, found).startswith(text)
    assert bool(_first_difference("train", stated, found)) == bool(text)


@pytest.mark.parametrize("command", ["compare", "diff"])
def test_contradicting_settings(honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(honest, run)
    shutil.copytree(honest, other)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 7"))
    run_command([command, str(other), str(run)])
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if line.startswith("altered")]
    assert len(lines) == 1
    assert "config.yaml: seed is 7, recorded 0" in lines[0]


@pytest.mark.parametrize(
    ("typed", "is_equal"),
    [
        ("epochs: 4\noptim: {lr: 5e-2, betas: [9e-1, 0.999]}\ncheckpoint: {every: 4 steps}\n", True),
        ("optim: {lr: 0.05}\nreport: {tensorboard: false}\n", True),
        ("epochs: 5\n", False),
        ("optim: {schedule: constant}\n", False),
        ("unheard: 1\n", False),
    ],
)
def test_typed_settings_are_compared_by_meaning(run: Path, typed: str, *, is_equal: bool) -> None:
    (run / "config.diff.yaml").write_text(typed)
    found = [text for text in verified(run, steps=(0, 1)).mismatches if text.startswith("config.diff.yaml")]
    assert (found == []) == is_equal


@pytest.mark.skipif(sys.platform != "linux", reason="holes in files")
@pytest.mark.parametrize("name", ["weights.safetensors", "steps.bin"])
def test_a_sparse_file_of_40_gigabytes_is_a_finding_at_once(run: Path, name: str) -> None:
    with (run / name).open("wb") as file:
        file.truncate(40 * 1024**3)
    began = time.monotonic()
    assert any(text.startswith(name) for text in verified(run, steps=(0, 1)).mismatches)
    assert time.monotonic() - began < 20


WARNING = "are not those of the checkpoint: the file was altered"


def stopped_and_resumed(run: Path, change: bool, stops: tuple[int, ...] = (12,)) -> str:
    """Train with stops, and return what the last resume prints."""
    prepare_process()
    with alone() as world:
        for number, stop in enumerate(stops):
            assert not train_until(world, run, stop_at=stop, resume="auto" if number else "never")
        if change:
            edit_evaluation(run, 5, top1=0.123)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            assert train_in(world, run, resume="auto") == 0
    return output.getvalue()


@pytest.mark.parametrize("stops", [(12,), (7, 13)])
def test_an_evaluation_that_was_altered_before_a_resume_is_named(tmp_path: Path, stops: tuple[int, ...]) -> None:
    assert WARNING in stopped_and_resumed(tmp_path / "run", True, stops)
    assert not verified(tmp_path / "run").is_verified


@pytest.mark.parametrize("stops", [(12,), (7, 13), (3,)])
def test_resumes_of_an_honest_run_warn_of_nothing(tmp_path: Path, stops: tuple[int, ...]) -> None:
    assert WARNING not in stopped_and_resumed(tmp_path / "run", False, stops)
    assert verified(tmp_path / "run").is_verified
