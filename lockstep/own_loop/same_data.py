"""Whether all ranks of an exact loop have the same data, compared before the first step.

Every rank computes its share of one order. With a split or a shuffle that is not seeded, index 5 is another sample on
each rank: some samples would be used twice in an epoch and others never, and no later check could find it.
"""

from __future__ import annotations

import numpy as np
import torch

from lockstep.cluster import collectives
from lockstep.cluster.world import World
from lockstep.data.digests import sample_digests
from lockstep.data.keyed import keys, seeded
from lockstep.data.loader import Loader
from lockstep.errors import DataError
from lockstep.own_loop.samples import LoaderSource
from lockstep.provenance.fingerprint import digest_of_sizes

NUM_SAMPLES = 4  # that are read, spread over the dataset


def check_same_data(world: World, source: LoaderSource, seed: int) -> None:
    """Compare the ranks' datasets: number of samples, sizes of files, and a few samples. Called on all ranks.

    Args:
        world: The ranks.
        source: This rank's data.
        seed: Seed of the loop.

    Raises:
        DataError: They differ; the same error on all ranks.
    """
    if world.size == 1:
        return
    by_rank = collectives.all_gather_object(world, _describe(source, seed))
    for name in dict.fromkeys(name for own in by_rank for name in own):
        values = [own.get(name, "none") for own in by_rank]
        if len(set(values)) > 1:
            raise DataError(
                f"the ranks have different data: {name}",
                given=", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))[:300],
                cause="A split or a shuffle without a seed, or other files on one machine.",
                fix="Seed everything that chooses samples, and give all ranks the same files.",
            )


def _describe(source: LoaderSource, seed: int) -> dict[str, str]:
    samples = source.samples
    found = {"number of samples": f"{len(samples):,}", "sizes of its files": digest_of_sizes(samples) or "none"}
    indices = np.unique(np.linspace(0, len(samples) - 1, NUM_SAMPLES, dtype=np.int64))
    requests = [(each, keys(seed, 0, each)) for each in indices.reshape(-1, 1)]
    # In a worker, as in training: open files of some libraries do not survive a fork.
    with seeded(seed):
        loader = Loader(samples, lambda: iter(requests), torch.device("cpu"), num_workers=min(1, source.num_workers))
        try:
            for request in requests:
                digests = sample_digests(loader.raw(*request))
                found |= {f"sample {index}": digest for index, digest in digests.items()}
        finally:
            loader.close()
    return found
