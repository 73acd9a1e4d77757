"""Counter-based random numbers: a pure function of a key, without generator state.

A key is 64 bits, mixed from (seed, purpose, index). No number depends on the numbers drawn before, or on the process
that draws it; JAX's random keys work in the same way. The mixing function is the finalizer of SplitMix64 (Steele, Lea
and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), a bijection of 64-bit integers.
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

# Purposes of keys: two uses of the same seed never share numbers.
ORDER, SAMPLE, FORWARD, DATA, CHECK, RECHECK = 1, 2, 3, 4, 5, 6


def mix(value: int) -> int:
    """Hash 64 bits: a bijection in which each input bit flips about half of the output bits."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def mix_array(values: KeyArray) -> KeyArray:
    """Apply `mix` to each element of an array of any shape. Does not change its argument."""
    values = values + np.uint64(GOLDEN)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def key(seed: int, *parts: int) -> int:
    """Derive a key in [0, 2**64) from a seed and any number of integers, whose order matters."""
    # The seed is mixed twice, since parts are mixed once: otherwise seed and first part could be swapped, and equal
    # ones would cancel out.
    value = mix(mix(seed & MASK))
    for part in parts:
        value = mix(value ^ mix(part & MASK))
    return value


def keys(seed: int, epoch: int, indices: IntArray) -> KeyArray:
    """Derive the keys of samples, (N,): `key(seed, SAMPLE, epoch, index)` for each index.

    Args:
        seed: Seed of the run.
        epoch: Epoch, from 0.
        indices: (N,) samples.
    """
    start = np.uint64(key(seed, SAMPLE, epoch))
    return mix_array(start ^ mix_array(indices.astype(np.uint64)))


def uniform(keys: KeyArray, column: int) -> npt.NDArray[np.float64]:
    """Return one uniform number in [0, 1) for each key, (N,). Different columns are independent.

    Args:
        keys: (N,) keys of samples.
        column: Index of the number among a sample's random numbers, from 0.
    """
    values = mix_array(keys ^ np.uint64(mix(column)))
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniforms(keys: KeyArray, columns: range) -> npt.NDArray[np.float64]:
    """Return `uniform` for several columns, (N, C)."""
    values = mix_array(keys[:, None] ^ _mixed(columns))
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=16)
def _mixed(columns: range) -> KeyArray:
    return np.array([mix(column) for column in columns], np.uint64)


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed the CPU generators of torch, numpy and Python by a key, and restore them afterwards."""
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
    """Seed the global generators of numpy and Python.

    numpy takes 32 bits of the key: an array of 64 bits costs 8 us more at each micro-batch.
    """
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key & MASK)


def seed_reading(keys: KeyArray) -> None:
    """Seed the global generators by the first of (N,) sample keys, so that every process reads the same values."""
    key = int(keys[0]) if len(keys) else 0
    torch.default_generator.manual_seed(key)
    seed_host(key)


def seed_forward(forward_key: int, device: torch.device) -> None:
    """Seed the generators that a forward pass can use: torch's on CPU and the device, numpy's and Python's."""
    torch.default_generator.manual_seed(forward_key)
    if device.type == "cuda":
        torch.cuda.manual_seed(forward_key)
    seed_host(forward_key)
