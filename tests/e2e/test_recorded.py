"""A refactoring must not change the results of training: an epoch of digits, compared with a recorded one.

If a change is intended, `python -m tests.e2e.test_recorded` records new values; the commit message gives the reason.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, records, result, samebits

RECORDED = ROOT / "tests" / "e2e" / "recorded.json"


def train(folder: Path) -> dict[str, Any]:
    settings = ["epochs=1", "report.every_steps=1"]
    samebits("train", "digits", *settings, "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    environment = json.loads((folder / "run" / "environment.json").read_text())
    return {
        "cpu": environment["cpu"],
        "torch": environment["packages"]["torch"],
        "losses": [round(record["loss"], 6) for record in records(folder / "run", "train")],
        "weights_sha256": result(folder / "run")["weights_sha256"],
    }


def test_an_epoch_of_digits_is_the_recorded_one(tmp_path: Path) -> None:
    recorded, now = json.loads(RECORDED.read_text()), train(tmp_path)
    assert len(now["losses"]) == 23
    # On another processor the last digits differ, and grow apart over the steps.
    assert now["losses"][:10] == pytest.approx(recorded["losses"][:10], rel=1e-3)
    if (now["cpu"], now["torch"]) == (recorded["cpu"], recorded["torch"]):
        assert now == recorded


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        RECORDED.write_text(json.dumps(train(Path(place)), indent=1) + "\n")
