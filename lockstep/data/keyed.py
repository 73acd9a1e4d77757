"""Random numbers as a pure function of a key.

A key is 64 bits, mixed from (seed, what for, which one). Nothing is drawn in turn, so nothing depends on what was drawn
before, by whom, or in which process. The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), a bijection of 64-bit words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# What a key is for: two uses of the same seed never share numbers.
ORDER, SAMPLE, FORWARD, DATA, CHECK = 1, 2, 3, 4, 5


def mix(word: int) -> int:
    """Scatter 64 bits: a bijection in which every input bit moves about half of the output bits."""
    word = (word + GOLDEN) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def mix_array(words: KeyArray) -> KeyArray:
    """`mix` for each element; the input is left as it is."""
    words = words + np.uint64(GOLDEN)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def key(seed: int, *parts: int) -> int:
    """A key in [0, 2**64) from a seed and any number of integers; the order of the parts counts."""
    # Mixed twice, as parts are mixed once: otherwise seed and first part could be swapped, and equal ones cancel out.
    word = mix(mix(seed & MASK))
    for part in parts:
        word = mix(word ^ mix(part & MASK))
    return word


def keys(seed: int, epoch: int, indices: IntArray) -> KeyArray:
    """The keys of samples: `key(seed, SAMPLE, epoch, index)` for each of (N,) indices."""
    start = np.uint64(key(seed, SAMPLE, epoch))
    return mix_array(start ^ mix_array(indices.astype(np.uint64)))


def uniform(keys: KeyArray, column: int) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each key; another column gives other numbers that are independent of the first.

    Args:
        keys: (N,) keys of samples.
        column: Which of a sample's random numbers, from 0.
    """
    words = mix_array(keys ^ np.uint64(mix(column)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniforms(keys: KeyArray, columns: range) -> npt.NDArray[np.float64]:
    """(N, C): `uniform` for each of C columns, at once."""
    words = mix_array(keys[:, None] ^ _mixed(columns))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=16)
def _mixed(columns: range) -> KeyArray:
    return np.array([mix(column) for column in columns], np.uint64)


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed torch's CPU generator, numpy's and Python's by a key, and put back what they were."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    key &= MASK
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def seed_host(key: int) -> None:
    """Seed numpy's and Python's global generators.

    numpy takes 32 bits of the key: an array of two words would cost 8 us more, at every micro-batch.
    """
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key & MASK)


def seed_reading(keys: KeyArray) -> None:
    """Seed the global generators by the first of some samples' keys, so that each process reads the same."""
    key = int(keys[0]) if len(keys) else 0
    torch.default_generator.manual_seed(key)
    seed_host(key)


def seed_forward(forward_key: int, device: torch.device) -> None:
    """Seed the generators that a forward pass can draw from: torch's, as dropout does, numpy's and Python's."""
    torch.default_generator.manual_seed(forward_key)
    if device.type == "cuda":
        torch.cuda.manual_seed(forward_key)
    seed_host(forward_key)
