"""Random numbers as functions of keys."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.keyed import FORWARD, ORDER, SAMPLE, key, keys, mix, mix_array, uniform, uniforms
from samebits.data.seeding import seeded

words = st.integers(0, 2**64 - 1)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(words, min_size=1, max_size=20))
def test_mixing_an_array_is_mixing_each_word_and_leaves_the_array_alone(values: list[int]) -> None:
    array = np.array(values, dtype=np.uint64)
    assert mix_array(array).tolist() == [mix(value) for value in values]
    assert array.tolist() == values


@settings(max_examples=300, deadline=None)
@given(seed=words, epoch=st.integers(0, 2**40), indices=st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_a_samples_key_follows_from_seed_epoch_and_index_alone(seed: int, epoch: int, indices: list[int]) -> None:
    assert keys(seed, epoch, np.array(indices)).tolist() == [key(seed, SAMPLE, epoch, index) for index in indices]


def test_keys_of_different_things_differ() -> None:
    seen = {key(seed, use, one, two) for seed in range(8) for use in (ORDER, SAMPLE, FORWARD) for one in range(16)
            for two in range(16)}  # fmt: skip
    assert len(seen) == 8 * 3 * 16 * 16
    assert key(0, 1, 2) != key(0, 2, 1)
    assert key(1, 2) != key(2, 1)
    assert key(1, 1) != key(2, 2)


def test_one_input_bit_moves_about_half_of_the_output_bits() -> None:
    moved = [(mix(word) ^ mix(word ^ (1 << bit))).bit_count() for word in range(50) for bit in range(64)]
    assert 31 < np.mean(moved) < 33
    assert min(moved) > 8


def test_uniform_numbers_are_uniform_and_columns_independent() -> None:
    samples = keys(3, 0, np.arange(100_000))
    first, second = uniform(samples, 0), uniform(samples, 1)
    for column in (first, second):
        assert 0 <= column.min() <= column.max() < 1
        counts, _ = np.histogram(column, bins=100, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 170  # 99 degrees of freedom: exceeded once in 100,000
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.015


def test_several_columns_at_once_are_the_same_numbers() -> None:
    samples = keys(3, 0, np.arange(50))
    assert np.array_equal(uniforms(samples, range(2, 9)), np.stack([uniform(samples, c) for c in range(2, 9)], axis=1))


@settings(max_examples=50, deadline=None)
@given(word=words)
def test_a_key_seeds_all_three_generators_and_restores_them_afterwards(word: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with seeded(word):
        inside = draw()
    assert draw() == expected
    draw()
    with seeded(word):
        assert draw() == inside


def test_generators_are_put_back_after_an_error_too() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeded(1):
        torch.rand(1 // 0)
    assert torch.equal(torch.get_rng_state(), state)
