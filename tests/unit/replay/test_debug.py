"""`samebits debug`: steps of finished and of broken runs, with planted incidents."""

import math
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samebits.errors import ConfigError
from samebits.provenance.record import read_steps, write_steps
from samebits.replay.debug import evaluated
from tests.runs import SAMEBITS, TINY, samebits

Look = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of digits, complete, with a checkpoint in its middle."""
    folder = tmp_path_factory.mktemp("runs")
    samebits("train", "digits", "epochs=1", "checkpoint.every=10 steps", "checkpoint.keep_every=10 steps",
             "--run-dir", "digits", cwd=folder)  # fmt: skip
    return folder


@pytest.fixture
def look(runs: Path) -> Look:
    def print_(run: str, *options: object, expression: str, cwd: Path = runs) -> subprocess.CompletedProcess[str]:
        return samebits("debug", run, *options, "--print", expression, cwd=cwd)

    return print_


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_step_of_a_run_is_replayed_and_equals_its_record(runs: Path, look: Look) -> None:
    before = content(runs / "digits")
    found = look("digits", "--step", 12, expression="len(batch), loss == record.loss, sorted(activations)[:2]")
    assert found.stdout.strip() == "(64, True, ['', 'classifier'])"
    assert "steps 10-12 equal the record, bit for bit; from the state before step 10" in found.stderr
    assert content(runs / "digits") == before


def test_several_values_of_one_step_are_printed_in_their_order(look: Look) -> None:
    found = look("digits", "--step", 10, "--print", "len(batch)", expression="record.step")
    assert found.stdout.split() == ["64", "10"]
    assert "step 10 equals the record, bit for bit; from the state before step 10" in found.stderr


def test_values_of_a_step_belong_together(look: Look) -> None:
    expression = (
        "bool((model.classifier(activations['dropout']) - activations['classifier']).abs().max() < 1e-4), "
        "abs(sum(norm ** 2 for norm in gradients.norms().values()) ** 0.5 - record.norm) < 1e-4, "
        "list(gradients.norms().values()) == sorted(gradients.norms().values(), reverse=True)"
    )
    assert look("digits", "--step", 3, expression=expression).stdout.strip() == "(True, True, True)"


def test_the_prompt_goes_forth_and_back(runs: Path) -> None:
    lines = "first = loss\nback()\nearlier = loss\nstep()\nprint('same', first == loss, earlier != loss)\n"
    process = subprocess.run(
        [*SAMEBITS, "debug", "digits", "--when", "step > 4"], cwd=runs, input=lines, text=True, capture_output=True
    )
    assert process.returncode == 0, process.stderr
    assert "same True True" in process.stdout
    assert "step       4:" in process.stderr


def test_the_step_that_reads_a_sample_is_found(look: Look) -> None:
    found = look("digits", "--sample", 471, expression="471 in batch.indices.tolist(), batch.names.count('471')")
    assert found.stdout.strip() == "(True, 1)"


def test_a_record_that_was_altered_is_named(runs: Path, look: Look, tmp_path: Path) -> None:
    shutil.copytree(runs / "digits", tmp_path / "digits")
    steps = tmp_path / "digits" / "steps.bin"
    log = read_steps(steps)
    records = [log.get(number) for number in range(log.stop)]
    record = records[12]
    records[12] = replace(record, loss=math.nextafter(record.loss, 9))
    write_steps(steps, replace(log, body=b"".join(each.to_bytes() for each in records if each is not None)))
    found = look("digits", "--step", 13, expression="loss", cwd=tmp_path)
    assert "step 12 DIFFERS from the record: loss recorded" in found.stderr


def _stopped(tmp_path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Train a run that stops at a step that is not finite, and follow the first line of the error's fix."""
    ended = samebits("train", *settings, "--run-dir", "broken run", cwd=tmp_path, code=6)
    fix = next(line for line in ended.stderr.splitlines() if "samebits debug" in line)
    _, *words = shlex.split(fix.partition("Look at the step: ")[2])
    return samebits(*words, "--print", "loss, len(batch)", cwd=tmp_path)


def test_the_fix_of_a_sample_that_is_not_a_number_names_the_sample(tmp_path: Path) -> None:
    found = _stopped(tmp_path, str(TINY), "data.bad_sample=7")
    assert "not finite sample 7, row" in found.stderr
    assert found.stdout.startswith("(nan, ")


def test_the_fix_of_an_exploding_model_names_the_module(tmp_path: Path) -> None:
    found = _stopped(tmp_path, "digits", "optim.lr=1e30", "optim.clip_norm=null")
    assert "the record has no step 1; those before it are equal, bit for bit" in found.stderr
    assert "not finite output of module features.2 (BatchNorm2d), micro-batch 0" in found.stderr


@pytest.mark.full
def test_classify_names_the_files_of_a_batch(tmp_path: Path) -> None:
    samebits("data", "make", "classify", "--out", "shapes", "num_per_class=8", "size_px=40", cwd=tmp_path)
    small = ["data.root=shapes", "epochs=1", "global_batch=16", "micro_batch=8"]
    samebits("train", "classify", *small, "--run-dir", "run", cwd=tmp_path)
    found = samebits("debug", "run", "--step", "1", "--print", "batch.names[0], batch.save('b.png')", cwd=tmp_path)
    assert ".png" in found.stdout or ".jpg" in found.stdout
    assert (tmp_path / "b.png").stat().st_size > 1000
    assert "equal the record, bit for bit" in found.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "no step was given"),
        (["--step", 99], "the run has no step 99"),
        (["--when", "loss > 99"], "no step of the record has loss > 99"),
        (["--when", "los > 3"], "los > 3 raised NameError"),
        (["--sample", 99999], "no step reads sample 99,999"),
    ],
)
@pytest.mark.full
def test_a_step_that_is_not_there_is_refused(runs: Path, options: list[Any], text: str) -> None:
    assert text in samebits("debug", "digits", *options, cwd=runs, code=2).stderr


def test_a_wrong_expression_names_what_can_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="ZeroDivisionError") as caught:
        evaluated("loss / 0", {"loss": 1.0})
    assert "loss" in caught.value.slots["allowed"]
