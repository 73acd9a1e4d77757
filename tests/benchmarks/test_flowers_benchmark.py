"""The benchmark of flowers: CPU time has that of orphans, and the table has the mean over the seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import flowers

ORPHAN = "import time\nwhile time.process_time() < 0.5: pass"
LEAVE_IT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {ORPHAN!r}])"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to another process")


@on_linux
def test_cpu_time_has_that_of_processes_that_outlive_the_command() -> None:
    before_s = flowers.cpu_s_of_children()
    subprocess.run([sys.executable, "-c", flowers.WAIT_FOR_ALL, sys.executable, "-c", LEAVE_IT], check=True)
    assert flowers.cpu_s_of_children() - before_s >= 0.5


@on_linux
def test_the_exit_status_is_that_of_the_command() -> None:
    command = [sys.executable, "-c", flowers.WAIT_FOR_ALL, sys.executable, "-c", "raise SystemExit(3)"]
    assert subprocess.run(command, check=False).returncode == 3


def test_the_table_has_a_row_per_seed_and_the_mean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given: list[tuple[int, float]] = []

    def run_samebits(folder: Path, seed: int, settings: list[str]) -> flowers.Outcome:
        assert (folder, settings) == (tmp_path, ["optim.lr=0.1"])
        return flowers.Outcome([(5.0, 50.0), (9.0 + seed, 70.0 + seed)], 40, 12.0)

    def run_hand_written(folder: Path, seed: int, minutes: float) -> flowers.Outcome:
        given.append((seed, minutes))
        return flowers.Outcome([(8.0, 60.0)], 30, 11.0)

    monkeypatch.setattr(flowers, "run_samebits", run_samebits)
    monkeypatch.setattr(flowers, "run_hand_written", run_hand_written)
    monkeypatch.setattr(sys, "argv", ["flowers.py", "--data", str(tmp_path), "--set", "optim.lr=0.1"])
    flowers.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-1] for row in rows if row[0] == "Samebits"] == ["70.0%", "71.0%", "72.0%", "71.0%"]
    assert rows[-1][-2:] == ["mean", "60.0%"]
    # The hand-written job gets the CPU time that Samebits took.
    assert given == [(0, 9.0), (1, 10.0), (2, 11.0)]
