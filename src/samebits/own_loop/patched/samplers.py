"""Evaluations with a DistributedSampler: each sample once over all processes that run, instead of a padded share."""

import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from samebits.own_loop.patched.script import Script


def share(script: Script, sampler: Any, indices: list[int]) -> Iterator[int]:
    """Return this rank's share of all indices of a DistributedSampler, each once over all ranks."""
    if rest := _num_twice(script, sampler, len(indices)):
        warnings.warn(
            f"{rest} of {len(indices):,} samples count twice on {script.world.size} processes, so that all ranks have "
            "equally many batches. Another batch size, or samebits.EvalLoader, counts each once.",
            stacklevel=2,
        )
        indices = indices + (indices * rest)[:rest]
    return iter(indices[script.world.rank :: script.world.size])


def share_length(script: Script, sampler: Any) -> int | None:
    """Return how many indices `share` gives after training has begun; None for the sampler that is trained on."""
    # One that drops the rest: scripts compute from its length and the world of their set-up where the rest begins.
    if script.exact is None or sampler is script.exact.sampler or sampler.drop_last:
        return None
    num = len(sampler.dataset)
    return len(range(script.world.rank, num + _num_twice(script, sampler, num), script.world.size))


def _num_twice(script: Script, sampler: Any, num: int) -> int:
    sizes = [each.batch_size or 1 for each in script.all_of(DataLoader) if each.sampler is sampler]
    # Ranks with unequal numbers of batches would wait forever in a script that reduces after each batch.
    return -num % script.world.size if sizes and -(-num // script.world.size) % sizes[0] == 1 else 0
