"""What decides the bits of a run beside its data and code, kept in each checkpoint and compared when it is used.

`config.yaml` and `dataset_info.json` in the run folder can be altered, damaged or lost. A checkpoint has a manifest of
its own, so what it holds is as it was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.schema import RunConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.provenance.same_run import differing, plain_settings

SETTINGS, FACTS = "settings", "facts_sha256"


def identity(config: RunConfig, dataset_info: Mapping[str, Any]) -> dict[str, Any]:
    """The settings and the SHA-256 of the dataset_info, as plain JSON.

    Args:
        config: The settings.
        dataset_info: What the recipe found in its data, as `dataset_info.json` keeps it.
    """
    return {SETTINGS: plain_settings(config), FACTS: _sha256(dataset_info)}


def check_settings(kept: Mapping[str, Any], config: RunConfig, path: Path, *, is_resume: bool) -> None:
    """Compare settings with those that a checkpoint was written with.

    Args:
        kept: The checkpoint's identity; empty in checkpoints from before it was kept.
        config: The settings now.
        path: The checkpoint.
        is_resume: Whether training is to go on from it. Otherwise `config` is the run folder's `config.yaml`.

    Raises:
        ConfigError: A setting that decides the result differs.
    """
    settings = kept.get(SETTINGS)
    if not isinstance(settings, Mapping):
        return
    other = differing(dict(settings), config)
    if not is_resume:
        other = [line for line in other if not line.startswith("recipe:")]  # the file may have been moved
    if not other:
        return
    if is_resume:
        raise ConfigError(
            f"checkpoint {path} was written with other settings",
            given="\n".join(other),
            fix="give the same settings to resume from it, or another --run-dir for a new run",
        )
    raise ConfigError(
        f"{path.parent.parent / 'config.yaml'} was altered: the run was trained with other settings",
        given="\n".join(other),
        where=f"checkpoint {path}",
        fix="put the file back as it was; to use other settings, give them on the command line",
    )


def is_vouched(kept: Mapping[str, Any]) -> bool:
    """Whether a checkpoint tells which dataset_info its run has."""
    return kept.get(FACTS) is not None


def check_dataset_info(kept: Mapping[str, Any], dataset_info: Mapping[str, Any], run: Path) -> None:
    """Compare dataset_info with those that a checkpoint was written with.

    Args:
        kept: The checkpoint's identity.
        dataset_info: What `dataset_info.json` holds, or where it is missing, what the recipe finds in its data.
        run: The run folder.

    Raises:
        CheckpointError: They are others.
    """
    before, now = kept.get(FACTS), _sha256(dataset_info)
    if before is None or before == now:
        return
    path = run / "dataset_info.json"
    if path.exists():
        raise CheckpointError(
            f"{path} was altered since the run began", recorded=before, found=now, fix="put the file back as it was"
        )
    raise CheckpointError(
        f"{path} is missing, and the data gives other dataset info than when the run began",
        recorded=before,
        found=now,
        fix="put the file back, or the data as it was",
    )


def _sha256(dataset_info: Mapping[str, Any]) -> str:
    # As JSON, names in their own order: a recipe may go by it.
    return hashlib.sha256(json.dumps(dataset_info).encode()).hexdigest()
