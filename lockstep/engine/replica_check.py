"""Detects ranks whose weights, buffers or optimizer state differ, before a checkpoint stores the difference.

Ranks never send their weights to each other: each one computes the same update. A difference on one of them (code,
rounding of another CPU, a memory fault) would persist and grow, and no loss would show it.
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
from lockstep.provenance.environment import environment

_PIECE = 1 << 18  # number of values that fit into the CPU cache together
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_COMPARED = ("commit", "python", "packages", "gpu", "cuda", "cpu")


class ReplicaCheck:
    """Compares the ranks at the interval `watch.replica_check_every`.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        every = job.config.watch.replica_check_every
        self._every = parse_interval(every) if every is not None and job.world.size > 1 else None
        self._compared_at = time.monotonic()
        self._equal_step: int | None = None

    def is_due(self, job: Job) -> bool:
        """Return whether to compare the ranks after the next step; rank 0's answer counts."""
        if self._every is None:
            return False
        step, steps_per_epoch = job.progress.step + 1, job.order.steps_per_epoch
        return self._every.is_due(step, steps_per_epoch, time.monotonic() - self._compared_at)

    def compare(self, job: Job) -> None:
        """Compare all ranks. Called on all of them.

        Raises:
            TrainError: They differ; the same error on all ranks.
        """
        job.world.activity.enter("comparing the ranks")
        tensors = job.replica.comparable(pack_job(job)[0], job.optimizer)
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
            f"{who} after step {job.progress.step:,}: first in {describe_tensor(differing[0], job)}, "
            f"{len(differing)} of {len(names)} tensors in all",
            given=f"equal after step {self._equal_step:,}; this step was not saved (watch.replica_check_every)"
            if self._equal_step is not None
            else "this step was not saved (watch.replica_check_every)",
            where="\n".join(f"rank {rank} (host {hosts[rank]})" for rank in (odd or range(len(hosts)))[:8]),
            cause=_cause(groups, info),
            fix=_fix(self._equal_step),
        )


def _fix(equal_step: int | None) -> str:
    known = f"of step {equal_step:,} or before" if equal_step is not None else "from before the ranks differed"
    return f"Remove the cause, then resume from a checkpoint {known}:\n--resume RUN/checkpoints/step-…"


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Compute a 64-bit checksum of each tensor that changes with any of its bits, on the tensor's device.

    Each value's bits are multiplied by an odd number of its own before they are added, so that no single change is
    lost. The odd numbers look random: with evenly spaced ones such as (1, 3, 5, 7), changes in several positions would
    often cancel. Sums of integers do not depend on their order.

    Args:
        tensors: Tensors of any shape, by name.

    Returns:
        The checksums, by name.
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
        # One transfer for all: on a GPU, each one waits for the device. An optimizer may keep some on the host.
        device = max((total.device for total in sums), key=lambda device: device.type == "cuda")
        numbers = torch.stack([total.to(device) for total in sums]).tolist()
    return dict(zip(tensors, numbers, strict=True))


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return odd int64 numbers that look random and are always the same (constants and shifts of splitmix64)."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1


def odd_ranks(groups: list[list[int]]) -> list[int]:
    """Return the ranks outside of the largest group of equal ranks; none if two groups are the largest."""
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


def _cause(groups: list[list[int]], info: list[dict[str, Any]]) -> str:
    """Describe how the groups of ranks differ beside their weights."""
    firsts = [group[0] for group in groups[:4]]
    lines = []
    for name in dict.fromkeys(name for rank in firsts for name in info[rank]):
        values = {rank: info[rank].get(name) for rank in firsts}
        if len(set(values.values())) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on rank {rank}" for rank, value in values.items()))
    if lines:
        return "\n".join(["The ranks do not run the same:", *lines[:5]])
    return (
        "Code that changes the model on one rank only, or a fault of its memory\n"
        "or device: versions, commit and hardware are equal."
    )


def _flat(info: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: info.get(name) for name in _COMPARED}
    packages = known.pop("packages") or {}
    return {**known, **packages}


def describe_tensor(name: str, job: Job) -> str:
    """Return `momentum_buffer of conv.weight` for `optimizer:0:momentum_buffer`."""
    if not name.startswith("optimizer:"):
        return name
    _, index, key = name.split(":")
    parameters = [parameter for group in job.optimizer.param_groups for parameter in group["params"]]
    names = {id(parameter): known for known, parameter in job.model.named_parameters()}
    return f"{key} of {names.get(id(parameters[int(index)]), f'parameter {index}')}"
