"""Seeding of the global generators of torch, numpy and Python by a key.

Apart from `keyed`, so that the order of samples can be computed without loading torch.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from samebits.data.keyed import FORWARD, MASK, KeyArray, key


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed the CPU generators of torch, numpy and Python by a key, and restore them afterwards."""
    restore = preserved(torch.device("cpu"))
    key &= MASK
    random.seed(key)
    # NumPy takes words of 32 bits.
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    # Not torch.manual_seed, which also seeds the generators of all GPUs, which are not restored below.
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        restore()


def preserved(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the generators of `seed_forward` to their present states."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)

    return restore


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


def seed_forward(forward_key: int, device: torch.device, *parts: int) -> None:
    """Seed the generators that a forward pass can use: torch's on CPU and the device, numpy's and Python's.

    Args:
        parts: Further parts of the key, for a second seeding within the micro-batch.
    """
    if parts:
        forward_key = key(forward_key, *parts)
    torch.default_generator.manual_seed(forward_key)
    if device.type == "cuda":
        torch.cuda.manual_seed(forward_key)
    seed_host(forward_key)


def seed_between(device: torch.device, seed: int, *parts: int) -> None:
    """Seed the generators of `seed_forward` outside of micro-batches, at a position that is equal on all ranks."""
    seed_forward(key(seed, FORWARD, *parts), device)
