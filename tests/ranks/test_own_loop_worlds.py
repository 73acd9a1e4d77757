"""Loops with `samebits.exact` give the same weights, buffers and optimizer states at any number of ranks."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks.own_loop_in_ranks import (
    Case,
    Flip,
    evaluate,
    import_same_modules,
    train,
    train_with_flips,
    warnings_of_attributes,
)
from tests.ranks.rank_pool import RankPool

CASES = st.builds(
    Case, num_samples=st.integers(3, 24), global_batch=st.integers(1, 12), micro_batch=st.integers(2, 5),
    passes=st.integers(1, 3), optimizers=st.integers(1, 2), clips=st.booleans(), batch_norm=st.booleans(),
    is_lazy=st.booleans(), unfreezes=st.booleans(), toggles=st.booleans(),
).filter(lambda case: not (case.toggles and case.unfreezes))  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _same_modules(pool: RankPool) -> None:
    # Tests before these have used some of the ranks only.
    pool.run(4, import_same_modules)


def with_pairs(case: Case) -> Case:
    """Give a case with batch norm micro-batches of two samples, because it needs more than one."""
    if not case.batch_norm:
        return case
    return replace(case, num_samples=2 * case.num_samples, global_batch=2 * case.global_batch, micro_batch=2)


def has_work(case: Case) -> bool:
    """Return whether a step has more than one micro-batch: otherwise `exact` refuses several ranks."""
    return min(case.num_samples, case.global_batch) > case.micro_batch


def check(pool: RankPool, case: Case, *worlds: int) -> str:
    (alone,) = pool.run(1, train, case)
    for world in worlds:
        assert pool.run(world, train, case) == [alone] * world, world
    return alone


@settings(max_examples=5)
@given(case=CASES.map(with_pairs).filter(has_work), world=st.integers(2, 4))
def test_any_loop_gives_the_bits_of_one_process(pool: RankPool, case: Case, world: int) -> None:
    check(pool, case, world)


@pytest.mark.full
@settings(max_examples=25)
@given(case=CASES.map(with_pairs).filter(has_work), world=st.integers(2, 4))
def test_many_more_loops_give_the_bits_of_one_process(pool: RankPool, case: Case, world: int) -> None:
    check(pool, case, world)


def test_batch_norm_and_ranks_without_micro_batches(pool: RankPool) -> None:
    # 17 samples: the last step has one micro-batch, which three of four ranks repeat with weight 0.
    check(pool, Case(num_samples=17, global_batch=15, micro_batch=5, batch_norm=True, passes=2, clips=True), 4)


@pytest.mark.full
def test_workers_of_the_data_loader_change_nothing(pool: RankPool) -> None:
    case = Case(num_samples=9, epochs=1)
    assert check(pool, replace(case, num_workers=1), 2) == check(pool, case)


def test_what_forward_infers_from_the_first_batch_of_a_rank_is_named(pool: RankPool) -> None:
    first, second = pool.run(2, warnings_of_attributes, False)
    assert {text.partition(" differs")[0] for text in first} == {"the attribute scale of the model"}
    assert second == []  # rank 0 has named it
    assert pool.run(2, warnings_of_attributes, True) == [[], []]
    assert pool.run(1, warnings_of_attributes, False) == [[]]


# With one process a step has 4 bodies, with two it has 2, and one of the first steps one more, a repetition.
@pytest.mark.parametrize(("world", "bodies", "place"), [(1, 6, "has 5 on this rank"), (2, 4, "has 2 on this rank")])
def test_a_loop_that_is_left_inside_a_step_is_named(pool: RankPool, world: int, bodies: int, place: str) -> None:
    with pytest.raises(AssertionError, match=place):
        pool.run(world, train, Case(num_samples=24, breaks_after=bodies))


def test_an_incomplete_last_step_is_left_out_if_the_loader_says_so(pool: RankPool) -> None:
    case = Case(num_samples=11, drop_last=True)
    assert check(pool, case, 3) != check(pool, replace(case, drop_last=False))


# With three samples, three of four ranks have none.
@pytest.mark.parametrize(("num_samples", "with_metrics"), [(3, False), pytest.param(18, True, marks=pytest.mark.full)])
def test_an_evaluation_is_the_same_at_any_number_of_ranks(pool: RankPool, num_samples: int, with_metrics: bool) -> None:
    if with_metrics:
        pytest.importorskip("torchmetrics")
    (alone,) = pool.run(1, evaluate, num_samples, with_metrics)
    assert alone[0]["count"] == num_samples
    assert alone[1] == [index % 3 for index in range(num_samples)]
    for world in (2, 4):
        assert pool.run(world, evaluate, num_samples, with_metrics) == [alone] * world


def flipped(pool: RankPool, choice: random.Random, rank: int, bit: int) -> None:
    """Flip a bit of a random gradient of a rank, in a run of 3 ranks: all of them name it, and the step."""
    flip = Flip(rank, choice.randrange(3, 16), choice.randrange(4), choice.randrange(1000), bit)
    errors = pool.run(3, train_with_flips, 17, [flip])
    assert len(set(errors)) == 1, errors
    assert f"rank {rank} computed a wrong gradient at step {flip.step}:" in errors[0], (flip, errors[0])


# The highest bit of an exponent: the gradient's norm is infinite then, which ends the loop at once.
@pytest.mark.parametrize(("rank", "bit"), [(0, 0), (1, 31), (2, 12), (0, 30), (1, 30)])
def test_a_flipped_bit_of_a_gradient_names_its_rank_while_the_loop_runs(pool: RankPool, rank: int, bit: int) -> None:
    flipped(pool, random.Random(rank), rank, bit)


@pytest.mark.full
@pytest.mark.parametrize("num", [24, pytest.param(60, marks=pytest.mark.lab)])
def test_each_of_many_flipped_bits_names_its_rank(pool: RankPool, num: int) -> None:
    choice = random.Random(5)
    for number in range(num):
        flipped(pool, choice, number % 3, choice.randrange(32))


# Several runs, because 2,000 steps in one take longer than ranks have for an answer, on a busy machine.
@pytest.mark.parametrize("runs", [1, pytest.param(5, marks=pytest.mark.full), pytest.param(20, marks=pytest.mark.lab)])
def test_ranks_that_compute_right_are_never_named(pool: RankPool, runs: int) -> None:
    for _ in range(runs):
        assert pool.run(3, train_with_flips, 100, []) == ["", "", ""]


def test_a_rank_that_errs_again_and_again_is_named_by_all_steps(pool: RankPool) -> None:
    flips = [Flip(2, step, 0, step, 3) for step in range(3, 16, 2)]
    (error, *_) = pool.run(3, train_with_flips, 17, flips)
    assert "rank 2 computed a wrong gradient at step 3" in error
    assert " of 8 compared steps differ" in error
