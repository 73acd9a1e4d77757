"""Whether all ranks have the same weights, buffers and optimizer state, compared before each epoch."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch

from lockstep.cluster import collectives
from lockstep.cluster.world import World
from lockstep.errors import TrainError
from lockstep.own_loop.session import ExactLoop
from lockstep.parallel.checksum import checksums
from lockstep.provenance.fingerprint import code_digests


def check_equal_state(loop: ExactLoop, world: World) -> None:
    """Compare the ranks. Called on all of them.

    Raises:
        TrainError: They differ; the same error on all ranks.
    """
    if world.size == 1:
        return
    sums = checksums(loop.state())
    brief = hashlib.sha256(repr((loop.step, sums)).encode()).hexdigest()
    if len(set(collectives.all_gather_object(world, brief))) == 1:
        return
    by_rank = collectives.all_gather_object(world, {"position": loop.step, **sums})
    names = list(dict.fromkeys(name for own in by_rank for name in own))
    differing = [name for name in names if len({own.get(name) for own in by_rank}) > 1]
    raise TrainError(
        f"the ranks differ after step {loop.step:,}: first in {differing[0]}, {len(differing)} of {len(names)} in all",
        where=", ".join(f"rank {rank}: {own.get(differing[0])}" for rank, own in enumerate(by_rank))[:300],
        cause="The script changes weights or optimizers on one rank only, or ranks loaded other checkpoints.",
        fix="Do on every rank what changes the model. Before a validation, call model.eval().",
    )


def check_same_script(world: World, settings: dict[str, Any]) -> None:
    """Compare the script, its modules and the settings of `exact` between the ranks. Called on all of them.

    Args:
        world: The ranks.
        settings: The settings, plain values by name.

    Raises:
        TrainError: They differ; the same error on all ranks.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""  # a notebook has none
    mine = {**{name: str(value) for name, value in settings.items()}, **code_digests(script)}
    mine["version of torch"] = torch.__version__
    by_rank = collectives.all_gather_object(world, mine)
    names = {name for own in by_rank for name in own}
    # What all ranks have is named first: a script in another folder also lacks the files of its folder.
    names_in_order = sorted(names, key=lambda name: (any(name not in own for own in by_rank), name))
    for name in names_in_order:
        values = [own.get(name, "missing") for own in by_rank]
        if len(set(values)) > 1:
            raise TrainError(
                f"the ranks differ in {name}",
                given=", ".join(f"rank {rank}: {value[:16]}" for rank, value in enumerate(values))[:300],
                cause="Another version of the script or of a package is on one machine, or arguments differ by rank.",
                fix="Start all ranks with the same files and the same arguments.",
            )
