"""What one rank does outside of computing, by the code of real ranks: join the others, and plan a step."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import HashStore

from samebits.cluster.env import RankAssignment
from samebits.cluster.rendezvous import RankInfo, Rendezvous
from samebits.cluster.signed import Seal, SignedStore
from samebits.engine.job import Job
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.halving import make_all_reduce
from samebits.parallel.tree import rank_nodes

_TIMEOUT_S = 600.0
_TRIALS = 3  # of which the fastest counts; the first one fills the caches


class _CountedStore(HashStore):
    """A store in this process's memory that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def set(self, key: str, value: str) -> None:
        """Count and pass on."""
        self.calls += 1
        super().set(key, value)

    def add(self, key: str, value: int) -> int:
        """Count and pass on."""
        self.calls += 1
        return super().add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Count and pass on."""
        self.calls += 1
        return super().compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        """Count and pass on."""
        self.calls += 1
        return super().check([*keys])


def join_calls(size: int) -> tuple[int, int]:
    """Count the calls of the store until all ranks have joined.

    All ranks register before the first one looks, so none waits. A rank that waits makes some calls more a second.

    Returns:
        The calls of rank 0, which reads all identities and publishes their list, and those of the last rank.
    """
    store = _CountedStore()
    calls = [0] * size
    ranks = [_rendezvous(rank, size, store) for rank in range(size)]
    for rank, each in enumerate(ranks):
        before = store.calls
        each.register()
        calls[rank] += store.calls - before
    for rank in dict.fromkeys((0, size - 1)):
        before = store.calls
        ranks[rank].wait()
        calls[rank] += store.calls - before
    return calls[0], calls[-1]


def _rendezvous(rank: int, size: int, store: HashStore) -> Rendezvous:
    return Rendezvous(
        RankAssignment(rank, size, rank, size, "", "command line"),
        RankInfo(rank, size, "simulated", 1 + rank, "cpu", "gloo", 0, network="simulated"),
        SignedStore(store, Seal("simulated", "simulated")),
        time.monotonic(),
        _TIMEOUT_S,
        lambda text: None,
        None,
    )


def plan_seconds(job: Job, size: int, num_steps: int) -> float:
    """Measure how long the last rank takes to plan a step.

    A plan is the rank's samples, the shares and nodes of all ranks, and the all-reduce of one bucket.

    Returns:
        Seconds for a step.
    """
    world = replace(job.world, rank=size - 1, size=size)
    bucket = Bucket([nn.Parameter(torch.zeros(1))], 0, size, True, torch.device("cpu"))

    def plan() -> float:
        began = time.perf_counter()
        for step in job.order.steps(world, start=0, stop=num_steps):
            make_all_reduce(bucket, world, rank_nodes(step.leaves, step.num_micro_batches), 0)
        return (time.perf_counter() - began) / num_steps

    return min(plan() for _ in range(_TRIALS))
