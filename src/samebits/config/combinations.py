"""Modes of training that exclude other settings, with the reason for the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig


def check_load_balancing(config: RunConfig) -> None:
    """Check that the work of a step can be divided by speed, if configured.

    Raises:
        ValueError: Another setting excludes it.
    """
    if not config.cluster.load_balancing:
        return
    obstacles = {
        f"mode={config.mode}": config.mode != "exact",
        f"parallel={config.parallel}": config.parallel != "ddp",
        "batch_norm=sync": config.batch_norm == "sync",
        "watch.recheck": config.watch.recheck is not None,
        "record.content=true": config.record.content,
    }
    for name, is_there in obstacles.items():
        if is_there:
            raise ValueError(
                f"cluster.load_balancing=true cannot be combined with {name}; fix: Set cluster.load_balancing=false."
            )
