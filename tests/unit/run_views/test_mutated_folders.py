"""One corpus of damaged run folders through all readers: what is whole is read, and an error has a text."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import samebits
from samebits.errors import SamebitsError
from samebits.provenance.run_files import RunFiles
from samebits.run_views.history import read_history
from samebits.run_views.page.build import report_page
from samebits.run_views.summary import read_summary
from tests.damage import DAMAGE
from tests.unit.run_views.folders import make_run

FILES = ("config.yaml", "config.diff.yaml", "environment.json", "metrics.jsonl", "result.json", "checkpoints/best.json",
         "provenance.json", "dataset_info.json", "run.lock", "logs/rank-0.log", "logs/launcher.log")  # fmt: skip


STRICT = ("settings", "result", "environment", "best", "worlds", "evaluations")


def problem_of(read: Callable[[], object]) -> SamebitsError | None:
    try:
        read()
    except SamebitsError as error:
        return error
    return None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_ends_no_view_and_is_named_where_it_is_needed(tmp_path: Path, name: str, damage: str) -> None:
    run = make_run(tmp_path / "a")
    whole = read_summary(run)
    DAMAGE[damage](run / name)
    history = read_history(run)
    assert read_summary(run).path == whole.path
    assert "<h1>a</h1>" in report_page([history])
    if name not in ("config.yaml", "environment.json", "result.json"):
        assert (history.summary.metrics, history.summary.weights_sha256) == (whole.metrics, whole.weights_sha256)
    if (run / "config.yaml").exists():
        json.dumps(samebits.Run.load(run).summary.to_plain(), default=str)
    strict, tolerant = RunFiles(run), RunFiles(run, is_tolerant=True)
    for each in STRICT:
        if problem := problem_of(partial(getattr, strict, each)):
            assert str(run) in str(problem)
            assert problem.slots["fix"]
        if each not in ("best", "evaluations"):
            assert getattr(tolerant, each) is not None
    assert all(isinstance(record, dict) for record in tolerant.records())
