"""This machine as the doctor sees it, with faults made for the purpose."""

import os
import resource
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from samebits.doctor import machine


class Usage(NamedTuple):
    """What `shutil.disk_usage` gives."""

    total: int
    used: int
    free: int


def test_a_healthy_machine_has_no_problem(tmp_path: Path) -> None:
    results = machine.whole(tmp_path / "runs" / "not-yet")
    assert [result for result in results if result.verdict == "problem"] == []
    assert {"python", "torch", "torchvision", "cores", "memory", "disk space", "disk speed", "shared memory"} <= {
        result.check for result in results
    }
    assert list(tmp_path.iterdir()) == []  # the trial write leaves nothing


@pytest.mark.parametrize(("free", "verdict"), [(100 * 2**20, "problem"), (2**30, "warning"), (2**40, "ok")])
def test_a_nearly_full_disk_is_named(free: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**41, 2**41 - free, free))
    found = machine.disk_space(tmp_path)
    assert found.verdict == verdict
    assert bool(found.fix) == (verdict != "ok")


def test_little_shared_memory_is_reported_with_dockers_option(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs("/dev/shm")
    values = list(real)
    values[4] = 64 * 2**20 // real.f_frsize  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*values, *([0] if len(values) == 10 else [])]))
    found = machine.shared_memory()
    assert found.verdict == "warning"
    assert "--shm-size" in found.fix


def test_a_low_limit_of_open_files_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    found = machine.open_files()
    assert (found.value, found.verdict) == ("at most 256", "warning")
    assert "ulimit -n 4096" in found.fix


def test_the_short_form_asks_for_shared_memory_only_where_workers_need_it(tmp_path: Path) -> None:
    assert [result.check for result in machine.short(tmp_path, needs_shared_memory=False)] == [
        "disk space",
        "open files",
    ]
    assert "shared memory" in {result.check for result in machine.short(tmp_path, needs_shared_memory=True)}
