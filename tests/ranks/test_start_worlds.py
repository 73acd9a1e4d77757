"""The start of a run: ranks that differ are refused, rank 0 gives facts and weights; what the doctor compares."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.doctor.examine import rounds
from tests.ranks import doctor_jobs
from tests.ranks.fingerprint_in_ranks import begin, begin_counted, compared
from tests.ranks.rank_pool import RankPool
from tests.ranks.recipe_in_ranks import carry_out
from tests.ranks.runs_in_ranks import started


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("recipe", "code of recipe.py"), ("sample", "training sample 5"), ("all samples", "training sample "),
        ("processor", "CPU capability: SVE512 on rank 2"), ("MKL", "MKL_CBWR: COMPATIBLE on rank 2, none on rank 0"),
        ("model", "gradients of a trial micro-batch"),
    ],
)  # fmt: skip
def test_a_rank_that_differs_is_named_with_what_it_has(pool: RankPool, tmp_path: Path, fault: str, named: str) -> None:
    texts = pool.run(3, begin, tmp_path, fault)
    assert len(set(texts)) == 1
    assert "launch error: rank " in texts[0]
    assert "differs from rank 0 in" in texts[0]
    assert named in texts[0]


def test_ranks_on_several_kinds_of_processors_are_told_what_to_set(pool: RankPool, tmp_path: Path) -> None:
    text = pool.run(3, begin, tmp_path, "processor")[0]
    assert "set kernels=portable" in text


def test_ranks_with_the_same_begin(pool: RankPool, tmp_path: Path) -> None:
    pool.run(3, begin, tmp_path, "MKL")  # a variable that was set meanwhile has no effect on later jobs
    assert pool.run(3, begin, tmp_path, "none") == [""] * 3


def test_only_ranks_that_differ_receive_the_values_of_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(3, begin_counted, tmp_path, "none") == [0] * 3
    assert min(pool.run(3, begin_counted, tmp_path, "sample")) > 0


@pytest.mark.parametrize(("size", "odd"), [(1, 0), (2, 0), (4, 3), (4, 9)])
def test_digests_show_on_every_rank_whether_values_are_equal(pool: RankPool, size: int, odd: int) -> None:
    has_odd = odd < size
    assert pool.run(size, compared, odd) == [(True, size == 1 or not has_odd, has_odd)] * size


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


@given(st.integers(2, 40))
def test_every_pair_meets_once_and_no_rank_is_in_two_pairs(world_size: int) -> None:
    all_rounds = list(rounds(world_size))
    assert sorted(pair for pairs in all_rounds for pair in pairs) == list(combinations(range(world_size), 2))
    for pairs in all_rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(all_rounds) <= world_size


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_healthy_world_is_all_well(pool: RankPool, world: int) -> None:
    answers = pool.run(world, doctor_jobs.links)
    assert all(answer == answers[0] for answer in answers)
    interface, pairs, gradients, sums = answers[0]
    assert (interface["check"], interface["value"]) == ("interface", "lo")
    assert (pairs["check"], pairs["verdict"]) == ("every pair", "ok")
    assert pairs["value"].startswith(f"{world * (world - 1) // 2} connect")
    assert (gradients["check"], gradients["verdict"]) == ("gradients", "ok")
    assert (sums["check"], sums["verdict"]) == ("all-reduce", "ok")
    assert sums["value"].startswith("correct; ")


def test_a_wrong_sum_is_a_problem(pool: RankPool) -> None:
    (*_, sums), *_ = pool.run(2, doctor_jobs.links, 1)
    assert sums["verdict"] == "problem"
    assert "WRONG sums at 1 KB" in sums["value"]


def test_the_rank_with_other_facts_is_named_on_all_ranks(pool: RankPool) -> None:
    answers = pool.run(3, doctor_jobs.summary, 1)
    assert all(answer == answers[0] for answer in answers)
    (torch_line,) = [line for line in answers[0] if line["check"] == "torch"]
    assert torch_line["verdict"] == "problem"
    assert "0.1 on rank 1" in torch_line["value"]


def test_each_rank_and_the_average_start_from_the_weights_of_the_recipe(pool: RankPool) -> None:
    assert pool.run(2, started) == [({"weights": "two"}, 2.0, 2.0)] * 2
