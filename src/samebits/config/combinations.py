"""Modes of training that exclude other settings, with the reason for the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.errors import ConfigError

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


def check_local_steps(config: RunConfig) -> None:
    """Check that sites can train on their own between two averages, if configured.

    Raises:
        ValueError: Another setting excludes it, or a site has no micro-batch.
    """
    if not config.has_local_steps:
        return
    sync = config.sync
    obstacles = {
        f"mode={config.mode}": config.mode != "exact",
        f"parallel={config.parallel}": config.parallel != "ddp",
        "batch_norm=sync": config.batch_norm == "sync",
        "precision=fp16": config.precision == "fp16",  # its loss scale would be one of each site
        "compile=true": config.compile,
        f"compress={config.compress}": config.compress != "none",
        "watch.recheck": config.watch.recheck is not None,
        "record.content=true": config.record.content,
        "cluster.recovery=in_step": config.cluster.recovery == "in_step",
        "cluster.load_balancing=true": config.cluster.load_balancing,
    }
    for name, is_there in obstacles.items():
        if is_there:
            setting = name.partition("=")[0]
            raise ValueError(
                f"sync.every={sync.every} with sync.sites={sync.sites} cannot be combined with {name}; "
                f"fix: Set sync.every=1, or leave {setting} at its default."
            )
    num_micro_batches = -(-config.global_batch // config.micro_batch)
    if num_micro_batches < sync.sites:
        raise ValueError(
            f"global_batch={config.global_batch} with micro_batch={config.micro_batch} has {num_micro_batches} "
            f"micro-batches, fewer than sync.sites={sync.sites}; "
            f"fix: Set micro_batch={max(1, config.global_batch // sync.sites)} or less."
        )


def refuse_local_steps(config: RunConfig, what: str) -> None:
    """Refuse settings with local steps, for a command that does not know them.

    Args:
        config: The settings.
        what: The command.

    Raises:
        ConfigError: The settings have local steps.
    """
    if config.has_local_steps:
        raise ConfigError(
            f"{what} does not support sync.every={config.sync.every} with sync.sites={config.sync.sites}",
            cause="Its steps would be outer steps, of which each has many local steps.",
            fix="Set sync.every=1 for this command.",
        )
