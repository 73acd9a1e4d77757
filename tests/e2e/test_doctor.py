"""`samebits doctor` as a user runs it."""

import json
from pathlib import Path

import pytest

from tests.runs import python, samebits


def test_the_doctor_looks_at_this_machine(tmp_path: Path) -> None:
    done = samebits("doctor", "--json", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert answer["world_size"] == 1
    assert {"python", "torch", "disk speed"} <= {finding["check"] for finding in answer["findings"]}
    assert all(set(finding) == {"check", "value", "verdict", "fix"} for finding in answer["findings"])


@pytest.mark.full
def test_the_doctor_looks_at_two_processes_their_settings_and_data(tmp_path: Path) -> None:
    done = samebits("doctor", "digits", "epochs=3", "--procs", 2, cwd=tmp_path)
    assert "doctor: 2 processes" in done.stdout
    for check in ("settings", "data", "clocks", "every pair", "all-reduce"):
        assert f" {check} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_wrong_setting_is_reported_before_any_check_runs(tmp_path: Path) -> None:
    done = samebits("doctor", "digits", "epoch=3", cwd=tmp_path, code=2)
    assert "epoch is not a setting" in done.stderr


@pytest.mark.full
def test_training_reports_at_its_start_what_the_doctor_would(tmp_path: Path) -> None:
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 4096)); "
    limited += "sys.argv = ['samebits', 'train', 'digits', 'epochs=1', '--procs', '1']; "
    limited += "runpy.run_module('samebits', run_name='__main__')"
    done = python("-c", limited, cwd=tmp_path)
    assert "WARNING  open files  at most 300" in done.stderr
    assert "ulimit -n 4096" in done.stderr
