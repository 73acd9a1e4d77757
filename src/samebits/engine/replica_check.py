"""Detect ranks whose weights, buffers or optimizer state differ, before a checkpoint stores the difference.

Ranks never send their weights to each other: each one computes the same update. A difference on one of them (code,
rounding of another CPU, a memory fault) would persist and grow, and no loss would show it.
"""

import time
from typing import Any

from samebits.cluster import collectives
from samebits.cluster.rendezvous import ranks_text
from samebits.config.interval import parse_interval
from samebits.engine.checkpoints import pack_job
from samebits.engine.job import Job
from samebits.errors import TrainError
from samebits.parallel.checksum import checksums
from samebits.provenance.fingerprint import environment

_COMPARED = ("commit", "python", "packages", "gpu", "cuda", "cpu")


class ReplicaCheck:
    """Compares the ranks at the interval `watch.replica_check_every`."""

    def __init__(self, job: Job) -> None:
        every = job.config.watch.replica_check_every
        self._every = parse_interval(every) if every is not None and job.world.size > 1 else None
        self._compared_at = time.monotonic()
        self._equal_step: int | None = None

    def is_due(self, job: Job) -> bool:
        """Return whether to compare the ranks after the next step; rank 0's answer counts."""
        if self._every is None:
            return False
        # The flag travels with the step that runs now, which the progress has not counted yet.
        step = job.progress.step + 1
        steps_per_epoch = job.order.steps_per_epoch
        return self._every.is_due(step, steps_per_epoch, time.monotonic() - self._compared_at)

    def compare(self, job: Job) -> None:
        """Compare all ranks. Called on all of them.

        Raises:
            TrainError: They differ; the same error on all ranks.
        """
        job.world.activity.enter("comparing the ranks")
        sums = checksums(pack_job(job)[0])
        # One digest per rank first; all sums are gathered only where it differs (ADR 17).
        if not collectives.are_equal(job.world, sums):
            raise self._explain(job, collectives.all_gather_object(job.world, sums))
        self._compared_at = time.monotonic()
        self._equal_step = job.progress.step

    def _explain(self, job: Job, by_rank: list[dict[str, int]]) -> TrainError:
        names = list(dict.fromkeys(name for sums in by_rank for name in sums))
        differing = [name for name in names if len({sums.get(name) for sums in by_rank}) > 1]
        # As text, since a dict can't be a key.
        groups = _groups([repr(sums) for sums in by_rank])
        odd = odd_ranks(groups)
        # Collective, so all ranks call it, although they all raise the same error in the end.
        known = {name: value for name, value in environment(job.world).items() if name in _COMPARED}
        packages = known.pop("packages", None) or {}
        info = collectives.all_gather_object(job.world, known | packages)
        hosts = collectives.all_gather_object(job.world, job.world.host)
        who = (
            f"{ranks_text(odd)} differ{'s' if len(odd) == 1 else ''} from the others"
            if odd
            else f"{' and '.join(map(ranks_text, groups[:4]))} differ"
        )
        step = self._equal_step
        known_good = (
            f"of step {step:,} or before" if step is not None else "from before the ranks differed"
        )
        return TrainError(
            f"{who} after step {job.progress.step:,}: first in {describe_tensor(differing[0], job)}, "
            f"{len(differing)} of {len(names)} tensors in all",
            given=f"equal after step {self._equal_step:,}; this step was not saved (watch.replica_check_every)"
            if self._equal_step is not None
            else "this step was not saved (watch.replica_check_every)",
            where="\n".join(
                f"rank {rank} (host {hosts[rank]})" for rank in (odd or range(len(hosts)))[:8]
            ),
            cause=_cause(groups, info),
            fix=f"Remove the cause, then resume from a checkpoint {known_good}:\n--resume RUN/checkpoints/step-…",
        )


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


def _cause(groups: list[list[int]], info: list[dict[str, Any]]) -> str:
    """Describe how the groups of ranks differ beside their weights."""
    firsts = [group[0] for group in groups[:4]]
    lines = []
    for name in dict.fromkeys(name for rank in firsts for name in info[rank]):
        values = {rank: info[rank].get(name) for rank in firsts}
        if len(set(values.values())) > 1:
            lines.append(
                f"{name}: " + ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
            )
    if lines:
        return "\n".join(["The ranks do not run the same:", *lines[:5]])
    return (
        "Code that changes the model on one rank only, or a fault of its memory\n"
        "or device: versions, commit and hardware are equal."
    )


def describe_tensor(name: str, job: Job) -> str:
    """Return `momentum_buffer of conv.weight` for `optimizer:0:momentum_buffer`."""
    if not name.startswith("optimizer:"):
        return name
    _, index, key = name.split(":")
    parameters = [
        parameter for group in job.optimizer.param_groups for parameter in group["params"]
    ]
    names = {id(parameter): known for known, parameter in job.model.named_parameters()}
    return f"{key} of {names.get(id(parameters[int(index)]), f'parameter {index}')}"
