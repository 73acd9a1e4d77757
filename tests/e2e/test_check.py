"""`samebits check` as a user types it: recipes with a planted fault, and recipes without one."""

import json
from pathlib import Path

import pytest

from tests.check_faults import FAULTS, MARK, Fault, check, source_of, verdict
from tests.runs import ROOT, samebits

QUICK = ("a numpy generator of the dataset",)
# `make bench-check` and `make test-cluster` have all.
CHOSEN = ("the rank in forward", "no fault: what is seeded, and state that has no effect")


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return [pytest.mark.full if name in CHOSEN else pytest.mark.lab]


def _marked(source: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), start=1) if MARK in line)


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name, marks=_marks(fault.name)) for fault in FAULTS])
def test_a_planted_fault_is_found_and_its_cause_is_named(fault: Fault, tmp_path: Path) -> None:
    report = check(fault, tmp_path, lambda words, cwd: samebits(*words, cwd=cwd, code=1 if fault.kinds else 0))
    assert verdict(fault, report) == (True, True), report
    assert [path.name for path in tmp_path.iterdir()] == ["faulty.py"]  # nothing is written beside the recipe


@pytest.mark.full
def test_a_report_names_module_cause_and_fix_in_80_columns(tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "a torch.Generator of the module")
    source = source_of(fault)
    (tmp_path / "recipe.py").write_text(source)
    done = samebits("check", "recipe.py", cwd=tmp_path, code=1)
    assert "FAIL" in done.stdout
    assert "`drop` differs between 1 process and 2 processes" in " ".join(done.stdout.split())
    assert f"(recipe.py:{_marked(source)})" in " ".join(done.stdout.split())
    assert "fix    Draw from torch's" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.lab
@pytest.mark.parametrize("recipe", ["digits", ROOT / "examples" / "own_recipe.py"])
def test_the_packages_recipe_and_the_example_are_exact(recipe: object, tmp_path: Path) -> None:
    done = samebits("check", recipe, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["exact"] is True
    assert report["findings"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.lab
@pytest.mark.parametrize("kind", ["example", "shapes"])
def test_recipes_with_synchronized_batch_norm_are_exact(tmp_path: Path, kind: str) -> None:
    recipe: tuple[object, ...] = (ROOT / "examples" / "own_recipe.py",)
    if kind == "shapes":
        samebits("data", "make", "classify", "--out", "shapes", "num_per_class=20", "size_px=40", cwd=tmp_path)
        recipe = ("shapes", "data.root=shapes", "data.size_px=32")
    report = json.loads(samebits("check", *recipe, "batch_norm=sync", "--json", cwd=tmp_path).stdout)
    assert report["findings"] == []
    assert len(report["ok"]) == 8


@pytest.mark.full
def test_a_recipe_that_fails_is_answered_with_its_line(tmp_path: Path) -> None:
    fault = Fault("an error", ("error",), {"FORWARD": f"raise KeyError('height')  {MARK}"})
    source = source_of(fault)
    (tmp_path / "recipe.py").write_text(source)
    done = samebits("check", "recipe.py", cwd=tmp_path, code=2)
    assert "config error: the recipe raised KeyError: 'height'" in done.stderr
    assert f"where  recipe.py:{_marked(source)}" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_reads", "code", "answer"),
    [
        (0, 1, "a DataLoader worker returned no batch for 4 s"),  # in the fingerprint
        (16, 4, "the run has made no progress for 4 s: reading samples"),
    ],
)
def test_a_worker_that_hangs_is_found(tmp_path: Path, num_reads: int, code: int, answer: str) -> None:
    source = {
        "DATA": "self.reads = 0",
        "SAMPLE": f"""self.reads += 1
        if torch.utils.data.get_worker_info() and self.reads > {num_reads}:
            threading.Event().wait()""",
        "MODULE": "import threading",
    }
    (tmp_path / "recipe.py").write_text(source_of(Fault("a hang", (), source)))
    done = samebits("check", "recipe.py", "watch.hang_timeout_s=4", cwd=tmp_path, code=code, TMPDIR=str(tmp_path))
    assert answer in " ".join((done.stdout + done.stderr).split())


def test_a_wrong_setting_is_answered_before_anything_runs(tmp_path: Path) -> None:
    done = samebits("check", "digits", "epoch=3", cwd=tmp_path, code=2)
    assert "epoch is not a setting" in done.stderr
