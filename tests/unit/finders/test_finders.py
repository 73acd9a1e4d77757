"""The learning-rate range test."""

import json
import math
from pathlib import Path

import pytest

from samebits.finders.learning_rate import rates, suggest
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
