"""Whether what meets belongs together: a run folder and the settings given for it, and the ranks of a world."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lockstep.config import document
from lockstep.config.given import flat
from lockstep.config.plain_file import read_plain
from lockstep.config.renamed import with_present_names
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError, LaunchError
from lockstep.storage.run_folder import RunFolder, holds_a_run
from lockstep.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from lockstep.cluster.world import World
    from lockstep.provenance.fingerprint import Fingerprint

# Settings that change how a run is carried out, but not what it gives.
FREE = {"loader", "cluster", "report", "checkpoint", "watch", "device", "eval_batch", "eval_every"}
FREE |= {"parallel", "activation_checkpointing"}
FREE |= {"data.root", "data.cache", "data.cache_gb"}
_MAX_CONFIG_BYTES = 4 * 1024 * 1024


def check_same_run(folder: RunFolder, config: RunConfig, resume: str) -> None:
    """See that a run folder is new, or holds the run that is to go on.

    Raises:
        CheckpointError: It holds a run, and nobody said to go on with it.
        ConfigError: It holds a run with other settings.
    """
    if not folder.config.exists():
        return
    if resume == "never" and folder.has_checkpoints:
        raise holds_a_run(folder.path)
    other = _differing(folder, config)
    if other and folder.has_checkpoints:
        raise ConfigError(
            f"run folder {folder.path} holds a run with other settings",
            given="\n".join(other),
            fix="Give the same settings to resume it, or another --run-dir for a new run."
            + _more_epochs(other, config, folder),
        )


def check_came_from(folder: RunFolder, config: RunConfig) -> None:
    """See that a checkpoint of another run folder can be gone on from.

    Where a run stands, and what its optimizer knows, mean something else under other settings.

    Args:
        folder: What the checkpoint lies in; it may be no run folder.
        config: What is to go on.

    Raises:
        ConfigError: The run there has other settings.
    """
    if folder.config.exists() and (other := _differing(folder, config)):
        raise ConfigError(
            f"the run in {folder.path} has other settings, so this one can't go on from its checkpoint",
            given="\n".join(other),
            fix="Give the same settings, or start a new run." + _more_epochs(other, config, folder),
        )


def _differing(folder: RunFolder, config: RunConfig) -> list[str]:
    """Settings on which the result depends, and that a run folder's run has otherwise."""
    return differing(_settings_of(folder), config)


def _settings_of(folder: RunFolder) -> dict[str, Any]:
    """What a run folder's `config.yaml` holds.

    Raises:
        ConfigError: It is damaged.
    """
    do = f"put {folder.config} back as it was, or move it away: checkpoints keep the settings too"
    try:
        return document.parse(read_plain(folder.config, _MAX_CONFIG_BYTES).decode(), str(folder.config)).values
    except ConfigError as error:
        raise ConfigError(error.what, **{**error.slots, "fix": do}) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{folder.config} is not text in UTF-8", given=f"byte {error.start} of the file", fix=do
        ) from None
    except OSError as error:
        raise ConfigError(f"{folder.config} can't be read: {error.strerror}", fix=do) from None


def differing(settings: dict[str, Any], config: RunConfig) -> list[str]:
    """Settings on which the result depends, and that other settings have otherwise, each with both values."""
    old = flat(_with_defaults(settings, config))
    new = flat(plain_settings(config))
    return [
        f"{name}: {old.get(name, 'nothing')} in the run, {new.get(name, 'nothing')} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in FREE and name.split(".")[0] not in FREE
    ]


def _more_epochs(other: list[str], config: RunConfig, folder: RunFolder) -> str:
    """Return how to train on with another number of epochs, where that is what differs."""
    if not any(line.startswith("epochs:") for line in other):
        return ""
    # The schedule of the learning rate covers all epochs, so another number of them is another run.
    if not hasattr(getattr(config, "model", None), "weights"):
        return "\nThe learning rate follows from epochs, so a run keeps its number of epochs."
    return (
        "\nTo train further from its weights, start a new run:\n"
        f"  --run-dir NEW model.weights={shlex.quote(str(folder.weights))} epochs={config.epochs}"
    )


def check_ranks_agree(
    world: World, config: RunConfig, model: nn.Module, num_samples: tuple[int, int], fingerprint: Fingerprint
) -> list[str]:
    """See that all ranks are about to do the same.

    Args:
        world: The ranks.
        config: The settings.
        model: On the device.
        num_samples: Of the training and the evaluation set.
        fingerprint: Of this rank.

    Returns:
        What differs and may, in fast mode: versions and processors, and samples as they decode them.

    Raises:
        LaunchError: A rank has other versions, settings, code, data or another model; the rank and what differs are
            named.
    """
    import torch

    from lockstep.cluster import collectives
    from lockstep.provenance.environment import PROCESSOR, device_name

    mine = {
        "lockstep": __version__,
        "torch": torch.__version__,
        "device": device_name(world.device),
        **{f"setting {name}": value for name, value in flat(config.model_dump(mode="json")).items()},
        "training samples": num_samples[0],
        "evaluation samples": num_samples[1],
        **{f"shape of {name}": str(tuple(tensor.shape)) for name, tensor in model.state_dict().items()},
        **fingerprint.code,
        **fingerprint.data,
        **fingerprint.trial,
    }
    for name in ("data.root", "data.cache"):  # each machine may have the data elsewhere
        mine.pop(f"setting {name}", None)
    kernels = {name: value for name, value in fingerprint.environment.items() if name != PROCESSOR and name not in mine}
    others = collectives.all_gather_object(world, (mine, kernels))
    allowed: list[str] = []
    for rank, (theirs, their_kernels) in enumerate(others):
        other_kernels = _unequal(others[0][1], their_kernels, rank)
        differing = _unequal(others[0][0], theirs, rank)
        if config.mode == "fast":
            # Other libraries and processors may round decoded samples otherwise.
            rounded = [line for line in differing if other_kernels and re.match(r"(training|evaluation) sample ", line)]
            allowed += [*other_kernels, *rounded]
            differing = [line for line in differing if line not in rounded]
        else:
            differing = [*other_kernels, *differing]
        if differing:
            raise LaunchError(
                f"rank {rank} differs from rank 0 in {len(differing)} thing{'s' if len(differing) > 1 else ''}",
                differ="\n".join(differing[:5]),
                fix="start all ranks with the same command, code, packages and data",
            )
    return allowed


def _unequal(first: Mapping[str, object], theirs: Mapping[str, object], rank: int) -> list[str]:
    """A line for each name under which a rank has something else than rank 0."""
    return [
        f"{name}: {theirs.get(name, 'none')} on rank {rank}, {first.get(name, 'none')} on rank 0"
        for name in dict.fromkeys([*first, *theirs])
        if first.get(name) != theirs.get(name)
        # Only rank 0 calls a recipe's `dataset_info`, and may load more modules for it.
        and (not name.startswith("code of ") or (name in first and name in theirs))
    ]


def _with_defaults(settings: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """A run's settings with the defaults of those that have come since it began."""
    settings = with_present_names(type(config), settings)
    try:
        return plain_settings(type(config).model_validate(settings))
    except ValidationError:  # a setting has gone, or means something else
        return settings


def plain_settings(config: RunConfig) -> dict[str, Any]:
    """The settings as plain values, paths from the root on: a run folder is used from other places too."""

    def whole(value: Any, plain: Any) -> Any:
        if isinstance(value, Path):
            return str(value.expanduser().absolute())
        if isinstance(value, dict):
            return {name: whole(item, plain[name]) for name, item in value.items()}
        return plain

    settings: dict[str, Any] = whole(config.model_dump(), config.model_dump(mode="json"))
    return settings
