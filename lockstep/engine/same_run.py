"""Whether what meets belongs together: a run folder and the settings given for it, and the ranks of a world."""

from __future__ import annotations

from typing import Any

import torch
import yaml
from pydantic import ValidationError
from torch import nn

from lockstep.cluster import collect
from lockstep.cluster.world import World
from lockstep.config.schema import RunConfig
from lockstep.engine.checkpoint import steps
from lockstep.engine.environment import device_name
from lockstep.engine.run_folder import RunFolder
from lockstep.errors import CheckpointError, ConfigError, LaunchError
from lockstep.version import __version__

# Settings that change how a run is carried out, but not what it gives.
FREE = {"loader", "cluster", "report", "checkpoint", "watch", "device", "eval_batch", "eval_every"}
FREE |= {"parallel", "activation_checkpointing"}
FREE |= {"data.root", "data.cache", "data.cache_gb"}


def check_same_run(folder: RunFolder, config: RunConfig, resume: str) -> None:
    """See that a run folder is new, or holds the run that is to go on.

    Raises:
        CheckpointError: It holds a run, and nobody said to go on with it.
        ConfigError: It holds a run with other settings.
    """
    if not folder.config.exists():
        return
    if resume == "never" and steps(folder.checkpoints):
        raise CheckpointError(
            f"run folder {folder.path} holds a run already",
            do="add --resume auto to go on with it, or give another --run-dir",
        )
    old = _flat(_with_defaults(yaml.safe_load(folder.config.read_text()) or {}, config))
    new = _flat(config.model_dump(mode="json"))
    other = [
        f"{name}: {old.get(name, 'nothing')} in the run, {new.get(name, 'nothing')} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in FREE and name.split(".")[0] not in FREE
    ]
    longer = old.get("epochs") != new.get("epochs")
    if other and steps(folder.checkpoints):
        raise ConfigError(
            f"run folder {folder.path} holds a run with other settings",
            given="\n".join(other),
            do="give the same settings to go on with it, or another --run-dir for a new run"
            + (
                "; the learning rate's schedule runs over all epochs, so more of them are another run" if longer else ""
            ),
        )


def check_ranks_agree(world: World, config: RunConfig, model: nn.Module, num_samples: tuple[int, int]) -> None:
    """See that all ranks are about to do the same.

    Raises:
        LaunchError: A rank has other versions, settings, data or another model; the rank and what differs are named.
    """
    mine = {
        "lockstep": __version__,
        "torch": torch.__version__,
        "device": device_name(world.device),
        **{f"setting {name}": value for name, value in _flat(config.model_dump(mode="json")).items()},
        "training samples": num_samples[0],
        "evaluation samples": num_samples[1],
        **{f"shape of {name}": str(tuple(tensor.shape)) for name, tensor in model.state_dict().items()},
    }
    for name in ("data.root", "data.cache"):  # each machine may have the data elsewhere
        mine.pop(f"setting {name}", None)
    others = collect.gather_all(world, mine)
    for rank, theirs in enumerate(others):
        differing = [name for name in others[0] | theirs if others[0].get(name) != theirs.get(name)]
        if differing:
            lines = [
                f"{name}: {theirs.get(name, 'none')} on rank {rank}, {others[0].get(name, 'none')} on rank 0"
                for name in differing[:5]
            ]
            raise LaunchError(
                f"rank {rank} differs from rank 0 in {len(differing)} thing{'s' if len(differing) > 1 else ''}",
                differ="\n".join(lines),
                do="start all ranks with the same command, code, packages and data",
            )


def _with_defaults(settings: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """A run's settings with the defaults of those that have come since it began."""
    try:
        return type(config).model_validate(settings).model_dump(mode="json")
    except ValidationError:  # a setting has gone, or means something else
        return settings


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
