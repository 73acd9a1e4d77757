"""What a worker reports of its own failure to the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samebits.cluster.env import RankAssignment
from samebits.errors import SamebitsError, SampleError, TrainError
from samebits.launch.worker import _report


def reported(folder: Path, error: SamebitsError) -> dict[str, object]:
    here = RankAssignment(1, 2, 1, 2, "tcp://h:1", "torchrun")
    with (folder / "rank-1-0.part").open("w") as file:
        _report(file, here, error)
    return json.loads((folder / "rank-1-0.json").read_text())


def test_an_error_that_names_the_ranks_at_fault_is_not_given_another_rank(tmp_path: Path) -> None:
    named = reported(tmp_path, TrainError("loss is not finite", where="rank 0 (host a, pid 7)\nsamples 1 2"))
    assert named["text"] == "training error: loss is not finite\n  where  rank 0 (host a, pid 7)\n         samples 1 2"
    assert "rank 1 (host " in str(reported(tmp_path, TrainError("loss is not finite", where="samples 1 2"))["text"])


@pytest.mark.parametrize("debug", ["0", "1"])
def test_debug_shows_the_traceback_of_an_error_for_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    monkeypatch.setenv("SAMEBITS_DEBUG", debug)
    try:
        raise SampleError("sample 7 of Blobs raised OSError") from OSError("cannot read 7.png")
    except SampleError as error:
        report = reported(tmp_path, error)
    assert (report["exit_code"], report["may_pass"]) == (3, True)
    assert str(report["text"]).startswith("data error: ") is (debug == "0")
    assert ("OSError: cannot read 7.png" in str(report["text"])) is (debug == "1")
