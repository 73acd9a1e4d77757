"""Random numbers of a rank depend on the seed, the rank and the epoch, and on the script's own seeds."""

import random

import numpy as np
import torch

from samebits.ranks.doors import Generators


def drawn() -> tuple[float, ...]:
    return float(torch.rand(())), float(np.random.rand()), random.random(), float(np.random.default_rng().random())


def test_two_ranks_and_two_seeds_draw_other_numbers() -> None:
    found = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (0, 0)):
        Generators(seed, rank)
        found.append(drawn())
    assert found[0] == found[3]
    assert all(len({each[kind] for each in found[:3]}) == 3 for kind in range(3))


def test_an_epoch_gives_its_numbers_whatever_was_drawn_before() -> None:
    generators = Generators(0, 0)
    generators.set_epoch(2)
    direct = drawn()[:3]
    again = Generators(0, 0)
    again.set_epoch(0)
    first = drawn()[:3]
    again.set_epoch(2)
    assert drawn()[:3] == direct != first


def test_the_scripts_own_seed_decides_in_each_epoch() -> None:
    found = []
    for seed in (7, 8, 7):
        generators = Generators(0, 0)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        generators.set_epoch(1)
        found.append(drawn()[:3])
    assert found[0] == found[2]
    assert all(one != other for one, other in zip(found[0], found[1], strict=True))


def test_ranks_that_a_script_gives_one_seed_draw_the_same_as_under_torchrun() -> None:
    found = []
    for rank in (0, 1):
        generators = Generators(0, rank)
        torch.manual_seed(3)
        generators.set_epoch(1)
        found.append(float(torch.rand(())))
    assert found[0] == found[1]


def test_a_generator_with_a_seed_of_its_own_keeps_it() -> None:
    plain = np.random.default_rng(5).random()
    Generators(0, 0)
    assert np.random.default_rng(5).random() == plain
