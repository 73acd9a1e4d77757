"""Random numbers of a rank: they depend on the seed, the rank and the epoch, never on where the rank runs.

    the rank starts     torch, numpy and Python are seeded by (seed, rank), for a script that leaves one unseeded
    manual_seed(7)      the script's own seed is used as it is
    set_epoch(3)        all three are keyed again, by (the seed that each of them had, 3)

So a script that saves no random state resumes with the numbers that it would have drawn. A script that gives all ranks
one seed still has equal numbers on all ranks, as under torchrun.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def key_of(*parts: object) -> int:
    """Return a seed of 32 bits, which numpy takes too, from any values."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


class Generators:
    """The global generators of torch, numpy and Python, seeded for one rank.

    Attributes:
        epoch: The epoch by which they were keyed last; None before the first one.
    """

    def __init__(self, seed: int, rank: int) -> None:
        base = key_of(seed, rank)
        self.epoch: int | None = None
        self._bases: dict[str, object] = {"torch": base, "numpy": base, "python": base}
        # In the modules: scripts that seed a generator of their own are not concerned.
        self._seed_numpy = _noted(np.random, "seed", self._note("numpy"))
        self._seed_python = _noted(random, "seed", self._note("python"))
        np.random.default_rng = self._default_rng(np.random.default_rng)
        self._torch_key = base
        torch.manual_seed(base)
        self._seed_numpy(base)
        self._seed_python(base)

    def set_epoch(self, epoch: int) -> None:
        """Key all of them by an epoch, which a script names before it trains on it."""
        self.epoch = epoch
        if torch.initial_seed() != self._torch_key:  # the script has seeded it since
            self._bases["torch"] = torch.initial_seed()
        self._torch_key = key_of(self._bases["torch"], epoch)
        torch.manual_seed(self._torch_key)
        self._seed_numpy(key_of(self._bases["numpy"], epoch))
        self._seed_python(key_of(self._bases["python"], epoch))

    def _note(self, name: str) -> Callable[[object], None]:
        def note(seed: object) -> None:
            self._bases[name] = seed

        return note

    def _default_rng(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Seed numpy's new generators, which would draw a seed from the system, as libraries of augmentations do."""
        count = 0

        def default_rng(seed: Any = None) -> Any:
            nonlocal count
            if seed is None:
                count += 1
                # In a worker of a DataLoader, torch's seed is the worker's.
                seed = [torch.initial_seed() & 0xFFFFFFFF, count]
            return plain(seed)

        return default_rng


def _noted(module: Any, name: str, note: Callable[[object], None]) -> Callable[..., None]:
    """Let a module's seeding function note what it is given; return the plain one."""
    plain: Callable[..., None] = getattr(module, name)

    def seed(value: Any = None, *args: Any, **kwargs: Any) -> None:
        plain(value, *args, **kwargs)
        note(value if value is None or isinstance(value, int | str | bytes) else repr(value))

    setattr(module, name, seed)
    return plain
