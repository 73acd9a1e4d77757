"""What the doctor finds: faults of this machine, the odd rank out, and the merged table."""

import io
import os
import resource
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch
from samebits.doctor import machine
from samebits.doctor.check_result import CheckResult, merged, table, verdict_line
from samebits.doctor.examine import compared, fingerprint
from samebits.report.console import Console


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


class Numbers:
    """Samples whose inputs are their own numbers."""

    def __init__(self, values: list[float]) -> None:
        self.values = torch.tensor(values)

    def __len__(self) -> int:
        return len(self.values)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        return Batch({"x": self.values[indices]}, ["label"], torch.from_numpy(np.asarray(indices)))


def test_equal_facts_are_one_line() -> None:
    found = compared("torch", ["2.15.0"] * 3, ["a", "a", "b"])
    assert (found.value, found.verdict) == ("2.15.0 on all 3", "ok")


def test_the_odd_rank_is_named_with_its_machine_and_what_to_do() -> None:
    found = compared("torch", ["2.15.0", "2.15.0", "2.14.1"], ["a", "a", "b"])
    assert found.verdict == "problem"
    assert "2.14.1 on rank 2 (b)" in found.value
    assert "2.15.0 on ranks 0 1" in found.value
    assert found.fix == "pip install torch==2.15.0 on b"


def test_many_odd_ranks_are_counted() -> None:
    found = compared("data", ["x"] * 10 + ["y"] * 9, ["a"] * 19)
    assert "and 5 more" in found.value


@pytest.mark.parametrize("fact", ["processor", "device"])
def test_another_machine_is_a_warning_since_training_works_but_for_equal_bits(fact: str) -> None:
    assert compared(fact, ["EPYC", "Xeon"], ["a", "b"]).verdict == "warning"


def test_a_datasets_fingerprint_follows_its_size_and_what_is_read() -> None:
    first = fingerprint(Numbers([1, 2, 3, 4]))
    assert first.startswith("4 samples ")
    assert fingerprint(Numbers([1, 2, 3, 4])) == first
    assert fingerprint(Numbers([1, 2, 3, 5])) != first
    assert fingerprint(Numbers([1, 2, 3])) != first
    assert fingerprint(Numbers([])) == "0 samples"


def shown(results: list[CheckResult]) -> list[str]:
    out = io.StringIO()
    Console(out, False).draw(table(results))
    return out.getvalue().splitlines()


SMALL = CheckResult("shared memory", "64 MB free", "warning", "docker run --shm-size=8g")
LARGE = CheckResult("shared memory", "8.0 GB free")


def test_equal_results_of_all_machines_are_shown_once() -> None:
    same = [CheckResult("cores", "8"), LARGE]
    assert merged([same, same, same], ["a", "b", "c"]) == same


def test_what_is_well_everywhere_takes_one_line_with_each_machines_value() -> None:
    (line,) = merged([[CheckResult("disk speed", "900 MB/s")], [CheckResult("disk speed", "400 MB/s")]], ["a", "b"])
    assert line == CheckResult("disk speed", "900 MB/s (a); 400 MB/s (b)")


def test_a_machine_with_a_fault_has_a_line_of_its_own() -> None:
    assert merged([[LARGE], [SMALL], [LARGE]], ["a", "b", "c"]) == [
        CheckResult("shared memory", "8.0 GB free (a, c)"),
        CheckResult("shared memory", "64 MB free (b)", "warning", SMALL.fix),
    ]


def test_several_ranks_of_one_machine_count_once() -> None:
    assert merged([[SMALL], [SMALL]], ["a", "a"]) == [SMALL]


def test_the_table_fits_80_columns_and_has_a_fix() -> None:
    long = CheckResult("every pair", " ".join(["word"] * 60), "problem", " ".join(["do"] * 80))
    lines = shown([LARGE, SMALL, long])
    assert max(map(len, lines)) <= 80
    assert lines[0] == "ok       shared memory  8.0 GB free"
    assert lines[1] == "WARNING  shared memory  64 MB free"
    assert lines[2].strip() == "fix  docker run --shm-size=8g"
    assert lines[3].startswith("PROBLEM  every pair")


def test_texts_of_other_machines_style_nothing() -> None:
    odd = CheckResult("[red]cpu", "[b]x[/b] \x1b[2J", "problem", "[i]y[/i]")
    assert shown([odd]) == ["PROBLEM  [red]cpu  [b]x[/b] \\x1b[2J", "                   fix  [i]y[/i]"]


def test_the_last_line_counts() -> None:
    assert verdict_line([LARGE, CheckResult("gpus", "none", "note")]) == "no problems found"
    assert verdict_line([SMALL, SMALL]) == "0 problems, 2 warnings"
    assert verdict_line([CheckResult("torch", "1.0", "problem"), SMALL]) == "1 problem, 1 warning"
