"""Finds ranks whose weights, buffers or optimizer state have come apart, before that is saved.

Ranks never send each other their weights: each makes the same update. What is not the same on one of them (code, a
processor's rounding, a memory's fault) would stay and grow, and no loss would tell.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.cluster import collectives
from lockstep.cluster.rendezvous import ranks_text
from lockstep.config.interval import parse_interval
from lockstep.engine.job import Job
from lockstep.engine.saving import pack_job
from lockstep.errors import TrainError
from lockstep.parallel.sharded_state import sharded_name
from lockstep.provenance.environment import environment

_PIECE = 1 << 18  # values that are in the processor's cache together
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_TELLING = ("commit", "python", "packages", "gpu", "cuda", "cpu")


class ReplicaCheck:
    """Compares the ranks now and then, as `watch.replica_check_every` says.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        every = job.config.watch.replica_check_every
        self._every = parse_interval(every) if every is not None and job.world.size > 1 else None
        self._compared_at = time.monotonic()
        self._equal_step: int | None = None

    def is_due(self, job: Job) -> bool:
        """Whether the ranks are to be compared after the next step; what rank 0 says counts."""
        if self._every is None:
            return False
        step = job.progress.step + 1
        if self._every.steps is not None:
            return step % self._every.steps == 0
        if self._every.epochs is not None:
            return step % (self._every.epochs * job.order.steps_per_epoch) == 0
        assert self._every.seconds is not None
        return time.monotonic() - self._compared_at >= self._every.seconds

    def compare(self, job: Job) -> None:
        """Compare all ranks. Called on all of them.

        Raises:
            TrainError: They differ; the same text for all.
        """
        job.world.activity.enter("comparing the ranks")
        tensors = pack_job(job)[0]
        if job.shards is not None:  # each rank has other parts: only what all have can be compared
            tensors = {
                name: tensor
                for name, tensor in tensors.items()
                if sharded_name(name, tensor, job.shards, job.optimizer) is None
            }
        sums = checksums(tensors)
        brief = hashlib.sha256(repr(sums).encode()).hexdigest()
        if len(set(collectives.all_gather_object(job.world, brief))) > 1:
            raise self._explain(job, collectives.all_gather_object(job.world, sums))
        self._compared_at, self._equal_step = time.monotonic(), job.progress.step

    def _explain(self, job: Job, by_rank: list[dict[str, int]]) -> TrainError:
        names = list(dict.fromkeys(name for sums in by_rank for name in sums))
        differing = [name for name in names if len({sums.get(name) for sums in by_rank}) > 1]
        groups = _groups([repr(sums) for sums in by_rank])
        odd = odd_ranks(groups)
        info = collectives.all_gather_object(job.world, _flat(environment(job.world)))
        hosts = collectives.all_gather_object(job.world, job.world.host)
        who = f"{ranks_text(odd)} differ{'s' if len(odd) == 1 else ''} from the others" if odd else _all_text(groups)
        return TrainError(
            f"{who} after step {job.progress.step:,}: first in {words(differing[0], job)}, "
            f"{len(differing)} of {len(names)} tensors in all",
            rank="\n".join(f"{rank} (host {hosts[rank]})" for rank in (odd or range(len(hosts)))[:8]),
            cause=_likely(groups, info),
            since=f"they were equal after step {self._equal_step:,}" if self._equal_step is not None else None,
            doing="stop (watch.replica_check_every); this step was not saved",
            fix=_advice(self._equal_step),
        )


def _advice(equal_step: int | None) -> str:
    known = f"of step {equal_step:,} or before" if equal_step is not None else "from before the ranks came apart"
    return f"mend the cause, then go on from a checkpoint {known}:\n--resume RUN/checkpoints/step-…"


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """A number of 64 bits for each tensor, that changes with any of its bits. Worked out where the tensor is.

    Each value's bits are multiplied by an odd number of its own before they are added, so that no single change is
    lost. The odd numbers look random: with evenly spaced ones, as (1, 3, 5, 7), changes of several places would often
    cancel. Sums of integers don't depend on their order.
    """
    weights: dict[torch.device, Tensor] = {}
    longest = max((tensor.nbytes // min(tensor.element_size(), 4) for tensor in tensors.values()), default=0)
    sums = []
    for tensor in tensors.values():
        if tensor.device not in weights:
            weights[tensor.device] = _odd_numbers(min(longest, _PIECE), tensor.device)
        values = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            total = 3 * total + (piece.to(torch.int64) * weights[tensor.device][: len(piece)]).sum()
        sums.append(total)
    numbers: list[int] = []
    if sums:
        # One read for all: on a GPU each would wait for the device. An optimizer may keep some on the host.
        device = max((total.device for total in sums), key=lambda device: device.type == "cuda")
        numbers = torch.stack([total.to(device) for total in sums]).tolist()
    return dict(zip(tensors, numbers, strict=True))


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Odd int64 numbers that look random, the same everywhere (steps and multipliers of splitmix64)."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1


def odd_ranks(groups: list[list[int]]) -> list[int]:
    """Those outside of the largest group of equal ranks; none where no group is the largest."""
    first, *others = sorted(groups, key=len, reverse=True)
    if not others or len(first) == len(others[0]):
        return []
    return sorted(rank for group in others for rank in group)


def _groups(values: list[Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return list(groups.values())


def _all_text(groups: list[list[int]]) -> str:
    if len(groups) == 2 and len(groups[0]) == 1:
        return f"ranks {groups[0][0]} and {groups[1][0]} differ"
    return f"{' and '.join(ranks_text(group) for group in groups[:4])} differ"


def _likely(groups: list[list[int]], info: list[dict[str, Any]]) -> str:
    """What tells groups of ranks apart beside their weights, if anything."""
    firsts = [group[0] for group in groups[:4]]
    lines = []
    for name in dict.fromkeys(name for rank in firsts for name in info[rank]):
        values = {rank: info[rank].get(name) for rank in firsts}
        if len(set(values.values())) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on rank {rank}" for rank, value in values.items()))
    if lines:
        return "\n".join(["they don't run the same:", *lines[:5]])
    return (
        "code that changes the model on one rank by itself, or a fault of its memory\n"
        "or device: versions, commit and hardware are equal"
    )


def _flat(info: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: info.get(name) for name in _TELLING}
    packages = known.pop("packages") or {}
    return {**known, **packages}


def words(name: str, job: Job) -> str:
    """`momentum_buffer of conv.weight` for `optimizer:0:momentum_buffer`."""
    if not name.startswith("optimizer:"):
        return name
    _, place, key = name.split(":")
    parameters = [parameter for group in job.optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): known for known, parameter in job.model.named_parameters()}
    return f"{key} of {names.get(id(parameters[int(place)]), f'parameter {place}')}"
