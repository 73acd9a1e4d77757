"""Dataset info and initial weights of a run: determined on rank 0, equal on every rank."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.rank_pool import RankPool
from tests.ranks.recipe_in_ranks import carry_out


@pytest.mark.parametrize("world", [1, 3])
def test_facts_are_found_once_and_kept_for_resumes_without_data(pool: RankPool, tmp_path: Path, world: int) -> None:
    first = pool.run(world, carry_out, tmp_path / "a", "never", {})
    assert [answer["asked"] for answer in first] == [1] + [0] * (world - 1)
    # JSON's form from the start: a tuple is a list, a key is text.
    assert all(answer["facts"] == {"names": ["cat", "dog", "cow"], "of": {"1": "x"}} for answer in first)
    assert json.loads((tmp_path / "a" / "dataset_info.json").read_text()) == first[0]["facts"]
    gone = pool.run(world, carry_out, tmp_path / "a", "auto", {"fault": "the data are gone"})
    assert [answer["facts"] for answer in gone] == [first[0]["facts"]] * world
    assert [answer["asked"] for answer in gone] == [0] * world
    assert {answer["weights"] for answer in gone} == {first[0]["weights"]}


def test_a_fault_in_the_data_is_reported_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    said = pool.run(3, carry_out, tmp_path / "a", "never", {"fault": "no pictures in here"})
    assert said == ["data error: no pictures in here"] * 3


def test_facts_that_are_no_json_are_refused(pool: RankPool, tmp_path: Path) -> None:
    (said,) = pool.run(1, carry_out, tmp_path / "a", "never", {"names": {1, 2}})
    assert said.startswith("config error: the result of the recipe's dataset_info can't be written as JSON\n")


def test_training_starts_from_rank_0s_weights_and_a_resume_ignores_them(pool: RankPool, tmp_path: Path) -> None:
    def run(world: int, name: str, resume: str = "never", **more: Any) -> dict[str, Any]:
        answers = pool.run(world, carry_out, tmp_path / name, resume, {"start": 0.5, **more})
        assert len({answer["weights"] for answer in answers}) == 1
        return answers[0]

    alone = run(1, "a")
    assert run(3, "b")["weights"] == alone["weights"]
    assert run(3, "c", start=0.25)["weights"] != alone["weights"]
    head = alone["said"]
    assert "weights  0.5 everywhere" in head
    again = run(3, "b", "auto", start=0.25)
    assert again["weights"] == alone["weights"]
    assert "everywhere" not in again["said"]


def test_a_start_that_fails_is_reported_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    said = pool.run(2, carry_out, tmp_path / "a", "never", {"start": -1.0})
    assert said == ["checkpoint error: nothing starts at -1.0"] * 2
