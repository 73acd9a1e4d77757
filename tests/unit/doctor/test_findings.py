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


@pytest.mark.parametrize(
    ("fact", "values", "machines", "verdict", "texts", "fix"),
    [
        ("torch", ["2.15.0"] * 3, "aab", "ok", ["2.15.0 on all 3"], ""),
        ("torch", ["2.15.0", "2.15.0", "2.14.1"], "aab", "problem", ["2.14.1 on rank 2 (b)", "2.15.0 on ranks 0 1"],
         "pip install torch==2.15.0 on b"),
        ("data", ["x"] * 10 + ["y"] * 9, "a" * 19, "problem", ["and 5 more"], None),
        # Training works on other machines too, but for equal bits.
        ("processor", ["EPYC", "Xeon"], "ab", "warning", [], None),
        ("device", ["EPYC", "Xeon"], "ab", "warning", [], None),
    ],
    ids=["equal", "an odd rank", "many odd ranks", "another processor", "another device"],
)  # fmt: skip
def test_facts_of_ranks_are_compared_and_the_odd_rank_is_named_with_what_to_do(
    fact: str, values: list[str], machines: str, verdict: str, texts: list[str], fix: str | None
) -> None:
    found = compared(fact, values, list(machines))
    assert found.verdict == verdict
    assert [text for text in texts if text not in found.value] == []
    assert fix is None or found.fix == fix


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


@pytest.mark.parametrize(
    ("results", "machines", "expected"),
    [
        ([[CheckResult("cores", "8"), LARGE]] * 3, "abc", [CheckResult("cores", "8"), LARGE]),
        ([[CheckResult("disk speed", "900 MB/s")], [CheckResult("disk speed", "400 MB/s")]], "ab",
         [CheckResult("disk speed", "900 MB/s (a); 400 MB/s (b)")]),
        ([[LARGE], [SMALL], [LARGE]], "abc",
         [CheckResult("shared memory", "8.0 GB free (a, c)"),
          CheckResult("shared memory", "64 MB free (b)", "warning", SMALL.fix)]),
        ([[SMALL], [SMALL]], "aa", [SMALL]),
    ],
    ids=["equal: once", "well everywhere: one line", "a fault: a line of its own", "ranks of one machine"],
)  # fmt: skip
def test_results_of_machines_are_merged(
    results: list[list[CheckResult]], machines: str, expected: list[CheckResult]
) -> None:
    assert merged(results, list(machines)) == expected


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
