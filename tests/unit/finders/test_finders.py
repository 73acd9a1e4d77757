"""The learning-rate range test and the search for the largest micro-batch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from samebits.finders.learning_rate import rates, suggest
from samebits.finders.memory import largest_that_fits
from tests.runs import TINY, samebits


def test_rates_have_a_constant_ratio() -> None:
    assert rates(1e-3, 10.0, 5) == pytest.approx([1e-3, 1e-2, 1e-1, 1.0, 10.0])


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    tested = rates(1e-5, 10.0, 61)
    losses = [2.3 - 2.0 / (1 + math.exp(-4 * (math.log10(lr) + 2))) for lr in tested]  # falls fastest at 0.01
    assert suggest(tested, [*losses[:50], *(9.0 * loss for loss in losses[50:])]) == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("losses", [[], [2.3] * 50, [2.3 + 0.1 * step for step in range(50)]])
def test_a_loss_that_does_not_fall_gives_no_suggestion(losses: list[float]) -> None:
    assert suggest(rates(1e-5, 1.0, 50), losses) is None


@pytest.mark.parametrize(
    ("bytes_per_sample", "limit", "out_of_memory_at", "most", "largest"),
    [
        (3, 400, 10**9, 1024, 100),
        (3, 400, 10**9, 64, 64),  # the whole global batch
        (3, 101, 10**9, 64, 0),
        (3, 103, 10**9, 64, 1),
        (0, 400, 10**9, 256, 256),
    ],
)
def test_the_largest_micro_batch_is_found_by_measuring_it(
    bytes_per_sample: int, limit: int, out_of_memory_at: int, most: int, largest: int
) -> None:
    measured = []

    def trial(size: int) -> int | None:
        measured.append(size)
        peak = 100 + bytes_per_sample * size
        return peak if peak < out_of_memory_at else None

    assert largest_that_fits(trial, 8, most, limit) == largest
    assert len(measured) == len(set(measured)) <= 12
    assert largest in [*measured, 0]


def test_a_size_that_runs_out_of_memory_is_approached_from_below() -> None:
    largest = largest_that_fits(lambda size: 100 + 3 * size if size < 1600 else None, 8, 4096, 10**9)
    assert 1500 < largest < 1600


@pytest.mark.full
def test_a_range_test_has_the_same_bits_on_one_three_and_four_processes(tmp_path: Path) -> None:
    for procs in (1, 3, 4):
        options = ["--procs", procs, "--steps", 30, "--from", 1e-4, "--to", 100, "--out", f"on-{procs}"]
        done = samebits("find", "lr", TINY, "device=cpu", *options, cwd=tmp_path)
        assert "learning rates from 0.0001 to 100" in done.stdout
    one, three, four = ((tmp_path / f"on-{procs}" / "lr.json").read_bytes() for procs in (1, 3, 4))
    assert one == three == four
    assert len(json.loads(one)["loss"]) >= 10
    assert (tmp_path / "on-3" / "lr.png").is_file()
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_the_micro_batch_found_is_written_as_a_setting(tmp_path: Path) -> None:
    options = ["--procs", 1, "--memory-gb", 100, "--out", "found.yaml"]
    done = samebits("find", "micro-batch", TINY, "device=cpu", *options, cwd=tmp_path)
    assert "largest that fits: micro_batch=24, the whole global_batch" in done.stdout
    assert yaml.safe_load((tmp_path / "found.yaml").read_text())["micro_batch"] == 24
    done = samebits("find", "micro-batch", TINY, "--memory-gb", 0.01, "device=cpu", "--procs", 1, cwd=tmp_path, code=2)
    assert "no micro-batch fits into 0.01 GB per process" in done.stderr
