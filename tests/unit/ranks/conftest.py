"""Ranks replace functions of torch for the life of a process: each test puts them back."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeding() -> Iterator[None]:
    """Put back the functions that `Generators` replaces, and the states of the generators."""
    plain = random.seed, np.random.seed, np.random.default_rng
    with torch.random.fork_rng():
        states = random.getstate(), np.random.get_state()
        yield
        random.setstate(states[0])
        np.random.set_state(states[1])
    random.seed, np.random.seed, np.random.default_rng = plain
