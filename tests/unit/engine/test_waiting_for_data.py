from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from samebits.cluster.world import alone
from samebits.report import speed
from tests.ranks.recipe_in_ranks import carry_out
from tests.runs import records, result


@pytest.mark.full
def test_a_run_reports_its_share_of_time_waiting_for_data_and_the_bottleneck(tmp_path: Path) -> None:
    with patch.object(speed, "LOADING_WINDOW_S", 0.2):
        answer = carry_out(alone("cpu"), tmp_path / "run", "never", {"read_s": 0.12})
    assert answer["said"].count("data loading is the bottleneck: ") == 1
    rows = [record["data_wait"] for record in records(tmp_path / "run", "train")]
    assert len(rows) == 4
    assert all(0.2 < share <= 1 for share in rows)
    seconds = result(tmp_path / "run")["seconds"]
    assert 16 * 0.12 <= seconds["data_wait"] <= seconds["training"]
    (line,) = [line for line in answer["said"].splitlines() if "of training time waiting for data" in line]
    assert float(line.split()[1].rstrip("%")) == pytest.approx(
        100 * seconds["data_wait"] / seconds["training"], abs=0.1
    )


def test_a_run_that_does_not_wait_for_data_reports_its_share_too(tmp_path: Path) -> None:
    answer = carry_out(alone("cpu"), tmp_path / "run", "never", {})
    assert "bottleneck" not in answer["said"]
    assert "of training time waiting for data" in answer["said"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["seconds"]["data_wait"] >= 0
