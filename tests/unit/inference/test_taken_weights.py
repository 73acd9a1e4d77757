"""Commands name the weights that they take."""

import json
from pathlib import Path

import pytest

from samebits.inference.taken_weights import describe_weights

BEST = {"step": 184, "metric": "top1", "value": 0.99444}


def folder(path: Path, best: object = BEST, result: object = None, *, is_complete: bool = True) -> Path:
    (path / "checkpoints").mkdir()
    (path / "checkpoints/best.json").write_text(json.dumps(best))
    (path / "result.json").write_text(json.dumps(result or {"steps": 230, "metrics": {"top1": 0.99167}}))
    if is_complete:
        (path / "weights.safetensors").touch()
        (path / "provenance.json").touch()
    return path


@pytest.mark.parametrize(
    ("which", "line"),
    [
        ("last", "final weights (step 230): top-1 99.17%; --checkpoint best (step 184): 99.44%"),
        ("best", "best checkpoint (step 184): top-1 99.44%"),
        ("step-000046", "checkpoint step-000046"),
    ],
)
def test_the_final_weights_are_named_with_the_best_ones(tmp_path: Path, which: str, line: str) -> None:
    assert describe_weights(folder(tmp_path), which) == line
    assert len(line) <= 80


def test_weights_that_no_statement_lists_are_named(tmp_path: Path) -> None:
    run = folder(tmp_path)
    (run / "provenance.json").unlink()
    first, second = describe_weights(run, "last").split("\n")
    assert first.startswith("final weights (step 230)")
    assert second.startswith("provenance.json is missing")
    assert len(second) <= 80


def test_final_weights_may_be_the_best(tmp_path: Path) -> None:
    run = folder(tmp_path, {**BEST, "step": 230, "value": 0.99167})
    assert describe_weights(run, "last") == "final weights (step 230), the best of the run: top-1 99.17%"


def test_a_run_that_is_not_complete_has_the_newest_checkpoint(tmp_path: Path) -> None:
    line = "newest checkpoint, because the run is not complete"
    assert describe_weights(folder(tmp_path, is_complete=False), "last") == line


def test_a_file_of_weights_is_not_described(tmp_path: Path) -> None:
    assert describe_weights(tmp_path / "weights.pth", "last") == ""


@pytest.mark.parametrize(
    "best",
    [
        [], {"step": "x" * 10**6, "metric": "top1", "value": 1}, {"step": 10**400, "metric": "top1", "value": 10**400},
        {"step": 1, "metric": "\x1b[2J", "value": 0.5}, {"step": -1, "metric": "m" * 1000, "value": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("which", ["last", "best", "\x1b[2J"])
def test_a_strangers_folder_prints_one_short_line_or_none(tmp_path: Path, best: object, which: str) -> None:
    line = describe_weights(folder(tmp_path, best, {"steps": 10**400, "metrics": {"top1": "x" * 10**6}}), which)
    assert len(line) < 200
    assert line.isprintable()
