"""Silent corruption of a gradient: what ranks find that compute the same micro-batch."""

import random
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samebits.cluster.world import alone
from samebits.data.division import PADDED
from samebits.data.order import Order
from samebits.errors import TrainError
from samebits.own_loop.idle import NUM_STEPS, IdleSlots, compare

NUM_FLIPS = 500
NUM_HONEST = 2_000


class Place:
    """A rank of a world of three."""

    size = 3
    machines = (0, 0, 0)

    def __init__(self, rank: int) -> None:
        self.rank = rank


def steps_of(rank: int, count: int):
    # 7 micro-batches: ranks 1 and 2 repeat one of rank 0.
    return Order(1400, 14, 2, division=PADDED).steps(Place(rank), stop=count)


def gradients(number: int) -> list[torch.Tensor]:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    F.cross_entropy(model(torch.randn(4, 6)), torch.randint(0, 3, (4,))).backward()
    return [parameter.grad for parameter in model.parameters()]


def sums(rank: int, count: int, flips: dict[int, random.Random]) -> list[list[int]]:
    """What a rank sends after some steps, in which a bit of its gradient may be flipped."""
    slots = IdleSlots(alone("cpu"))
    for step in steps_of(rank, count):
        for micro_batch in step.micro_batches:
            slots.begin(step, micro_batch)
            if slots._now is None:
                continue  # not one that several ranks compute
            given = gradients(micro_batch.step * 100 + micro_batch.index)
            if (choice := flips.get(step.number)) is not None and micro_batch is step.micro_batches[-1]:
                bits = choice.choice(given).view(-1).view(torch.int32)
                place = choice.randrange(len(bits))
                bits[place] ^= torch.tensor(1 << choice.randrange(32)).to(torch.int32)
            for each in given:
                slots.take(each)
    return [[number, int(total)] for number, total in slots._sums.items()]


@pytest.mark.full
def test_each_of_500_flipped_bits_is_found_and_2000_honest_steps_are_equal() -> None:
    honest = [sums(rank, NUM_HONEST, {}) for rank in range(3)]
    assert [len(each) for each in honest] == [NUM_HONEST] * 3
    compare(honest)
    choice = random.Random(7)
    wrong = sums(1, NUM_FLIPS, dict.fromkeys(range(NUM_FLIPS), choice))
    for number in range(NUM_FLIPS):
        with pytest.raises(TrainError, match=rf": rank 1 computed a wrong gradient at step {number:,}:"):
            compare([[each[number]] for each in (honest[0], wrong, honest[2])])


@pytest.mark.parametrize("rank", [1, 2])
def test_a_flipped_bit_names_the_rank(rank: int) -> None:
    found = [sums(each, 10, {4: random.Random(3)} if each == rank else {}) for each in range(3)]
    with pytest.raises(TrainError) as caught:
        compare(found)
    assert caught.value.what.startswith(f"rank {rank} computed a wrong gradient at step 4:")
    assert caught.value.slots["given"] == "1 of 10 compared steps differ"


@pytest.mark.parametrize(
    ("by_rank", "who"),
    [
        ([[[0, 5]], [[0, 5]], [[0, 5]]], ""),
        ([[[0, 5]], [[0, 6]], []], "one of ranks 0 1"),
        # In another step, another rank has the micro-batch.
        ([[[0, 5]], [[1, 8]], [[0, 6], [1, 9]]], "rank 2"),
        ([[[0, 4]], [[0, 6]], [[0, 6]]], "rank 0"),
    ],
)
def test_the_rank_in_most_differences_is_named(by_rank: list[list[list[int]]], who: str) -> None:
    if not who:
        compare(by_rank)
        return
    with pytest.raises(TrainError, match=f": {who} computed a wrong gradient"):
        compare(by_rank)


def test_idle_ranks_repeat_the_first_micro_batch_of_each_other_rank_in_turn() -> None:
    leaves = PADDED.leaves(8, 3)  # 3, 3 and 2
    assert [PADDED.passes(leaves, 2, step) for step in range(3)] == [[6, 7, 0], [6, 7, 3], [6, 7, 0]]
    assert [PADDED.passes(leaves, rank, 1) for rank in range(2)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("size", "num"), product((2, 3, 4), (1, 2, 5, 7)))
def test_all_ranks_have_equally_many_micro_batches(size: int, num: int) -> None:
    leaves = PADDED.leaves(num, size)
    for step in range(4):
        assert len({len(PADDED.passes(leaves, rank, step)) for rank in range(size)}) == 1
    assert NUM_STEPS > 1
