"""`samebits diff` on runs of a tiny recipe: the fifty planted differences are in benchmarks/diff_faults.py."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from samebits.cli.main import run
from samebits.provenance.record import StepLog, StepRecord, read_steps, write_steps
from samebits.replay.diff import diff_runs, lines
from samebits.replay.folders import first_difference
from tests.diff_trials.faults import faults
from tests.diff_trials.runs import NUM_STEPS, Trials


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    found = Trials(tmp_path_factory.mktemp("diff"))
    found.train(found.folder / "a", "first", "first")
    found.first[()] = found.folder / "a"
    return found


def content_of(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    "name",
    [
        "last bit of a weight",
        pytest.param("optim.momentum=0.8", marks=pytest.mark.full),
        pytest.param("a factor of the gradient for one sample", marks=pytest.mark.full),
    ],
)
def test_a_planted_difference_is_located(trials: Trials, name: str) -> None:
    (fault,) = (each for each in faults() if each.name == name)
    found = trials.compare(fault, 0)
    assert not found.is_equal
    assert found.location.step == fault.step
    assert f"{found.location.phase}: {found.location.module}".startswith(fault.place)
    assert found.location.a != found.location.b
    assert 0 < found.location.num_replays <= 10  # 2 log2(40 steps)
    assert any(line.startswith(f"begins     step {fault.step}, {found.location.phase}") for line in lines(found))


def test_equal_runs_are_equal_and_their_folders_unchanged(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = trials.folder / "a", trials.folder / "copy"
    shutil.copytree(a, b)
    before = content_of(trials.folder)
    assert run(["diff", str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_equal"]
    assert found["location"] is None
    assert found["num_compared"] == NUM_STEPS
    assert content_of(trials.folder) == before
    shutil.rmtree(b)


def test_a_refactoring_that_changes_no_bit_is_equal(trials: Trials) -> None:
    (fault,) = (each for each in faults() if each.name == "sum in another order")
    same = (("return F.relu(x + y + self.shift)", "return torch.clamp_min(y.add(x) + self.shift, 0)"),)
    found = trials.compare(type(fault)("code", "the same in other words", None, code=same), 1)
    assert found.is_equal
    assert any(change.name.startswith("recipe.py, line") for change in found.folders.code)


def test_an_untrusted_recipe_is_compared_but_not_run(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, recipe = trials.folder / "a", trials.folder / "theirs", trials.folder / "stranger" / "recipe.py"
    shutil.copytree(a, b)
    recipe.parent.mkdir()
    recipe.write_text("raise AssertionError('it was run')")
    config = (b / "config.yaml").read_text().replace(str(trials.folder / "first" / "recipe.py"), str(recipe))
    (b / "config.yaml").write_text(config)
    steps = bytearray((b / "steps.bin").read_bytes())
    steps[-60] ^= 1  # a bit of the last loss
    (b / "steps.bin").write_bytes(steps)
    assert run(["diff", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert f"first difference: step {NUM_STEPS - 1}, loss" in text
    assert "is not trusted, so it was not run" in text
    assert run(["diff", str(a), str(b), "--no-replay"]) == 1
    # The user may name a recipe file for a run.
    found = diff_runs(a, b, recipes=(None, trials.folder / "first" / "recipe.py"))
    assert not found.problem
    assert found.location.phase == "not reproduced"
    shutil.rmtree(b)
    shutil.rmtree(recipe.parent)


def test_a_setting_that_determines_the_result_is_refused(trials: Trials, tmp_path: Path) -> None:
    shutil.copytree(trials.folder / "a", tmp_path / "b")
    steps = bytearray((tmp_path / "b" / "steps.bin").read_bytes())
    steps[-60] ^= 1
    (tmp_path / "b" / "steps.bin").write_bytes(steps)
    found = diff_runs(trials.folder / "a", tmp_path / "b", ["optim.lr=1.0"])
    assert "a replay can't change settings that determine the result" in found.problem


def test_a_record_with_more_steps_than_the_settings_is_reported(trials: Trials, tmp_path: Path) -> None:
    for name, loss in (("a", 1.0), ("b", 2.0)):
        shutil.copytree(trials.folder / "a", tmp_path / name)
        log = read_steps(tmp_path / name / "steps.bin")
        further = StepRecord(NUM_STEPS, loss, 1.0, 0.1, bytes(16)).to_bytes()
        write_steps(tmp_path / name / "steps.bin", replace(log, body=log.body + further))
    found = diff_runs(tmp_path / "a", tmp_path / "b")
    assert f"records step {NUM_STEPS}, and its settings lead to {NUM_STEPS} steps" in found.problem


def test_runs_with_altered_files_are_not_equal(trials: Trials, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(trials.folder / "a", tmp_path / name)
    assert diff_runs(tmp_path / "a", tmp_path / "b").is_equal
    weights = bytearray((tmp_path / "b" / "weights.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "b" / "weights.safetensors").write_bytes(weights)
    found = diff_runs(tmp_path / "a", tmp_path / "b")
    assert not found.is_equal
    assert [text.partition(" has sha256 ")[0] for text in found.folders.altered] == ["b: weights.safetensors"]
    assert any(line.startswith("altered    b: weights.safetensors") for line in lines(found))


def test_the_common_part_of_two_logs_is_compared() -> None:
    def log(losses: list[float], first: int = 0) -> StepLog:
        records = [StepRecord(first + step, loss, 1.0, 0.1, bytes(16)) for step, loss in enumerate(losses)]
        return StepLog(b"".join(record.to_bytes() for record in records), first_step=first)

    assert first_difference(log([1.0, 2.0]), log([1.0, 2.0, 3.0])) == (2, None)
    assert first_difference(log([1.0, 2.0]), log([5.0], first=2)) == (0, None)
    num_compared, found = first_difference(log([1.0, 2.0, 3.0]), log([2.0, 3.5], first=1))
    assert num_compared == 2
    assert found.step == 2
    assert [(each.name, each.a, each.b) for each in found.fields] == [("loss", "3.0", "3.5")]
