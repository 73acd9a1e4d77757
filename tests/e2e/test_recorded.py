"""A refactoring must not change the results of training: an epoch of digits, compared with a recorded one.

If a change is intended, `python -m tests.e2e.test_recorded` records new values; the commit message gives the reason.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, records, result, samebits

RECORDED = ROOT / "tests" / "e2e" / "recorded.json"


def train(folder: Path) -> dict[str, Any]:
    settings = ["epochs=1", "report.every_steps=1"]
    samebits("train", "digits", *settings, "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return {
        "losses": [round(record["loss"], 6) for record in records(folder / "run", "train")],
        "weights_sha256": result(folder / "run")["weights_sha256"],
    }


def test_an_epoch_of_digits_is_the_recorded_one(tmp_path: Path) -> None:
    assert train(tmp_path) == json.loads(RECORDED.read_text())  # on every processor: it is portable


@pytest.mark.full
def test_digits_prints_the_readmes_hash_on_every_processor(tmp_path: Path) -> None:
    variables = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    said = samebits("train", "digits", "--procs", 2, "--run-dir", tmp_path / "run", cwd=tmp_path, **variables).stdout
    (shown,) = set(re.findall(r"weights +sha256 (\S+)", (ROOT / "README.md").read_text()))
    assert f"sha256 {shown}" in said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        RECORDED.write_text(json.dumps(train(Path(place)), indent=1) + "\n")
