"""The doctor between processes: every pair once, the sum right, the odd one named."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.doctor.links import rounds
from tests.ranks import doctor_jobs
from tests.ranks.rank_pool import RankPool


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
    interface, pairs, sums = answers[0]
    assert (interface["check"], interface["value"]) == ("interface", "lo")
    assert (pairs["check"], pairs["verdict"]) == ("every pair", "ok")
    assert pairs["value"].startswith(f"{world * (world - 1) // 2} connect")
    assert (sums["check"], sums["verdict"]) == ("all-reduce", "ok")
    assert sums["value"].startswith("correct; ")


def test_a_wrong_sum_is_a_problem(pool: RankPool) -> None:
    (_, _, sums), *_ = pool.run(2, doctor_jobs.links, 1)
    assert sums["verdict"] == "problem"
    assert "WRONG sums at 1 KB" in sums["value"]


def test_the_rank_with_other_facts_is_named_on_all_ranks(pool: RankPool) -> None:
    answers = pool.run(3, doctor_jobs.summary, 1)
    assert all(answer == answers[0] for answer in answers)
    (torch_line,) = [line for line in answers[0] if line["check"] == "torch"]
    assert torch_line["verdict"] == "problem"
    assert "0.1 on rank 1" in torch_line["value"]
