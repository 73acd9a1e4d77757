"""Comparisons of settings: of a run folder with the current ones, and of the ranks of a world."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from samebits.config import document
from samebits.config.given import flat
from samebits.config.load import names_of, without_removed
from samebits.config.schema import Mark, RunConfig, marks_of
from samebits.errors import CheckpointError, ConfigError, LaunchError, cannot_read
from samebits.plain_file import read_plain
from samebits.storage.run_folder import RunFolder, check_utf8, holds_a_run
from samebits.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from samebits.cluster.world import World
    from samebits.provenance.fingerprint import Fingerprint


_MAX_CONFIG_BYTES = 4 * 1024 * 1024


def check_same_run(folder: RunFolder, config: RunConfig, resume: str) -> None:
    """Check that a run folder is new, or holds the run to resume.

    Raises:
        CheckpointError: It holds a run, and --resume was not given.
        ConfigError: It holds a run with other settings.
    """
    if not folder.config.exists():
        return
    check_utf8(folder.path)
    if resume == "never" and folder.has_checkpoints:
        raise holds_a_run(folder.path)
    settings = settings_of(folder)
    name = Path(config.recipe).name
    if folder.has_checkpoints and Path(str(settings.get("recipe"))).name != name:
        quoted = shlex.quote(str(folder.path))
        raise ConfigError(
            f"{folder.path} is a run of {settings.get('recipe')}, and not of {name}",
            fix="To resume it, name no recipe; for a new run, give another --run-dir:\n"
            f"  samebits train --run-dir {quoted} --resume auto",
        )
    other = differing(settings, config)
    if other and folder.has_checkpoints:
        raise ConfigError(
            f"run folder {folder.path} holds a run with other settings",
            given="\n".join(other),
            fix="Give the same settings to resume it, or another --run-dir for a new run."
            + _longer(other, config, folder),
        )


def check_came_from(folder: RunFolder, config: RunConfig) -> None:
    """Check that training can resume from a checkpoint of another run folder.

    The step and the optimizer state have another meaning under other settings.
    """
    if not folder.config.exists():
        return
    check_utf8(folder.path)
    if other := differing(settings_of(folder), config):
        raise ConfigError(
            f"the run in {folder.path} has other settings, so this run can't resume from its checkpoint",
            given="\n".join(other),
            fix="Give the same settings, or start a new run." + _longer(other, config, folder),
        )


def check_replay(run: Path, config: RunConfig, *, is_other_recipe: bool = False) -> None:
    """Check that the steps of a run can be repeated bit for bit with these settings."""
    settings = settings_of(RunFolder(run))
    paths = [name for name, value in flat(config.model_dump()).items() if is_path(value)]
    other = [
        line
        for line in differing(
            settings | {"recipe": config.recipe} if is_other_recipe else settings, config
        )
        if line.partition(":")[0] not in paths  # what lies there is compared
    ]
    if other:
        raise ConfigError(
            "a replay can't change settings that determine the result",
            given="\n".join(other),
            fix="Give only settings that are paths, such as data.root, and those that do not change the result.",
        )


def settings_of(folder: RunFolder) -> dict[str, Any]:
    """Read a run folder's `config.yaml`. Raises ConfigError if it is damaged."""
    fix = f"Restore {folder.config}, or move it away: checkpoints have the settings too."
    try:
        return document.parse(
            read_plain(folder.config, _MAX_CONFIG_BYTES).decode(), str(folder.config)
        ).values
    except ConfigError as error:
        raise error.with_slots(fix=fix) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{folder.config} is not text in UTF-8",
            given=f"byte {error.start} of the file",
            fix=fix,
        ) from None
    except OSError as error:
        raise cannot_read(ConfigError, folder.config, error, fix) from None


def differing(settings: dict[str, Any], config: RunConfig) -> list[str]:
    """Return a line with both values for each setting that differs and changes the result."""
    # With the defaults of settings that were introduced after the run started.
    settings = without_removed(settings, names_of(type(config)))
    with suppress(ValidationError):  # a setting changed its meaning
        settings = plain_settings(type(config).model_validate(settings))
    old = flat(settings)
    new = flat(plain_settings(config))
    return [
        f"{name}: {old.get(name, 'not set')} in the run, {new.get(name, 'not set')} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not is_free(name, config)
    ]


def is_free(name: str, config: RunConfig | None = None) -> bool:
    """Return whether a setting, by its dotted name, does not change the result; without `config`, of a usual run."""
    marks = marks_of(name)
    if Mark.VALIDATION in marks:
        return config is None or config.stop_early.patience is None
    return Mark.RESULT not in marks


def is_path(value: object) -> bool:
    """Return whether a setting is a path, or a list of them: its content determines the result, not its name."""
    return any(
        isinstance(each, Path) for each in (value if isinstance(value, list | tuple) else [value])
    )


def result_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the result, by dotted name, without paths; a recipe file by its name alone."""
    paths = {name for name, value in flat(config.model_dump()).items() if is_path(value)}
    settings = {
        name: value
        for name, value in flat(plain_settings(config)).items()
        if not is_free(name, config) and name not in paths
    }
    return settings | {"recipe": Path(config.recipe).name}


def _longer(other: list[str], config: RunConfig, folder: RunFolder) -> str:
    """Return how to train longer, where the length of the run is what differs."""
    name = next(
        (name for name in ("epochs", "max_steps") for line in other if line.startswith(f"{name}:")),
        None,
    )
    if name is None:
        return ""
    # The schedule of the learning rate covers the whole run, so a run of another length is another run.
    return (
        f"\nThe learning rate follows from {name}, so a run keeps its {name}.\n"
        f"{ways_to_train_longer(folder, config, f'{name}={getattr(config, name)}')}"
    )


def ways_to_train_longer(folder: RunFolder, config: RunConfig, length: str | None = None) -> str:
    """Return the command of a longer run: from its final weights, if it has some, or from the start."""
    length = length or ("epochs=N" if config.max_steps is None else "max_steps=N")
    command = f"samebits train {shlex.quote(str(folder.config))} --run-dir NEW {length}"
    if not hasattr(getattr(config, "model", None), "weights") or not folder.weights.is_file():
        return f"To train longer, start a new run:\n  {command}"
    return (
        "To train further from its weights, start a new run:\n"
        f"  {command} model.weights={shlex.quote(str(folder.weights))}"
    )


def check_ranks_agree(
    world: World,
    config: RunConfig,
    model: nn.Module,
    sizes: Mapping[str, int],
    fingerprint: Fingerprint,
) -> None:
    """Check that all ranks have the same code, settings, data and model."""
    import torch

    from samebits.cluster import collectives
    from samebits.provenance.fingerprint import HARDWARE, PROCESSOR, device_name

    mine = {
        "samebits": __version__,
        **(
            {}
            if config.kernels == "portable"
            else {"torch": torch.__version__, "device": device_name(world.device)}
        ),
        **{
            f"setting {name}": value
            for name, value in flat(config.model_dump(mode="json")).items()
            if Mark.MACHINE not in marks_of(name)
        },
        **{f"{name} samples": size for name, size in sizes.items()},
        **{
            f"shape of {name}": str(tuple(tensor.shape))
            for name, tensor in model.state_dict().items()
        },
        **fingerprint.code,
        **fingerprint.data,
        **fingerprint.trial,
    }
    kernels = {
        name: value
        for name, value in fingerprint.environment.items()
        if name != PROCESSOR and name not in mine
    }
    first, first_kernels = collectives.broadcast_object(world, (mine, kernels))
    differences = _unequal(first_kernels, kernels, world.rank), _unequal(first, mine, world.rank)
    # A rank receives rank 0's values only, and the differences of all ranks only where there are some.
    if not collectives.any_rank(world, any(differences)):
        return
    for rank, (other_kernels, differing) in enumerate(
        collectives.all_gather_object(world, differences)
    ):
        if differing := [*other_kernels, *differing]:
            fix = "Start all ranks with the same command, code, packages and data."
            if any(line.split(":")[0] in HARDWARE for line in other_kernels):
                fix = (
                    "Start all ranks on machines of one kind. For a new run on several kinds of processors,\n"
                    "set kernels=portable."
                )
            num = f"{len(differing)} thing{'s' if len(differing) > 1 else ''}"
            raise LaunchError(
                f"rank {rank} differs from rank 0 in {num}", given="\n".join(differing[:5]), fix=fix
            )


def _unequal(first: Mapping[str, object], theirs: Mapping[str, object], rank: int) -> list[str]:
    """Return a line for each name whose value on a rank differs from rank 0's."""
    return [
        f"{name}: {theirs.get(name, 'none')} on rank {rank}, {first.get(name, 'none')} on rank 0"
        for name in dict.fromkeys([*first, *theirs])
        if first.get(name) != theirs.get(name)
        # Only rank 0 calls a recipe's `dataset_info`, which may load more modules.
        and (not name.startswith("code of ") or (name in first and name in theirs))
    ]


def plain_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings as plain values, with absolute paths: a run folder is read from other folders too."""

    def whole(value: Any, plain: Any) -> Any:
        if isinstance(value, Path):
            return str(value.expanduser().absolute())
        if isinstance(value, dict):
            return {name: whole(item, plain[name]) for name, item in value.items()}
        return plain

    settings: dict[str, Any] = whole(config.model_dump(), config.model_dump(mode="json"))
    return settings


# The identity of a run: what determines its bits beside data and code. Stored in each checkpoint, compared at its use.
#
# `config.yaml` and `dataset_info.json` in the run folder can be altered, damaged or lost. A checkpoint has a manifest
# of its own, so its copy of them is trustworthy.


SETTINGS = "settings"
DATASET_INFO = "dataset_info_sha256"


def identity(config: RunConfig, dataset_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and the SHA-256 of the content of `dataset_info.json`, as plain JSON."""
    return {SETTINGS: plain_settings(config), DATASET_INFO: _sha256(dataset_info)}


def check_settings(
    kept: Mapping[str, Any], config: RunConfig, path: Path, *, is_resume: bool
) -> None:
    """Compare settings with those in a checkpoint, at a resume from it or in the `config.yaml` of its run folder."""
    settings = kept.get(SETTINGS)
    if not isinstance(settings, Mapping):
        return
    other = differing(dict(settings), config)
    if not is_resume:
        # the file may have moved
        other = [line for line in other if not line.startswith("recipe:")]
    if not other:
        return
    if is_resume:
        raise ConfigError(
            f"checkpoint {path} was written with other settings",
            given="\n".join(other),
            fix="Give the same settings to resume from it, or another --run-dir for a new run.",
        )
    raise ConfigError(
        f"{path.parent.parent / 'config.yaml'} was altered: the run was trained with other settings",
        given="\n".join(other),
        where=f"checkpoint {path}",
        fix="Restore the file; to use other settings, give them on the command line.",
    )


def check_dataset_info(kept: Mapping[str, Any], dataset_info: Mapping[str, Any], run: Path) -> None:
    """Compare dataset info, as in `dataset_info.json` or as the recipe reads it, with the hash in a checkpoint."""
    before = kept.get(DATASET_INFO)
    now = _sha256(dataset_info)
    if before is None or before == now:
        return
    path = run / "dataset_info.json"
    what = f"{path} was altered since the run started"
    fix = "Restore the file."
    if not path.exists():
        what = f"{path} is missing, and the data has other dataset info than when the run started"
        fix = "Restore the file, or the data."
    raise CheckpointError(
        what, given=f"sha256 {now}", allowed=f"sha256 {before}, recorded in the checkpoint", fix=fix
    )


def _sha256(dataset_info: Mapping[str, Any]) -> str:
    # The order of the names counts: a recipe may depend on it.
    return hashlib.sha256(json.dumps(dataset_info).encode()).hexdigest()
