"""The identity of a run: what determines its bits beside data and code. Stored in each checkpoint, compared at its use.

`config.yaml` and `dataset_info.json` in the run folder can be altered, damaged or lost. A checkpoint has a manifest of
its own, so its copy of them is trustworthy.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError
from samebits.provenance.same_run import differing, plain_settings

SETTINGS, DATASET_INFO = "settings", "dataset_info_sha256"


def identity(config: RunConfig, dataset_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and the SHA-256 of the content of `dataset_info.json`, as plain JSON."""
    return {SETTINGS: plain_settings(config), DATASET_INFO: _sha256(dataset_info)}


def check_settings(kept: Mapping[str, Any], config: RunConfig, path: Path, *, is_resume: bool) -> None:
    """Compare settings with those in a checkpoint, at a resume from it or in the `config.yaml` of its run folder."""
    settings = kept.get(SETTINGS)
    if not isinstance(settings, Mapping):
        return
    other = differing(dict(settings), config)
    if not is_resume:
        other = [line for line in other if not line.startswith("recipe:")]  # the file may have moved
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
    before, now = kept.get(DATASET_INFO), _sha256(dataset_info)
    if before is None or before == now:
        return
    path = run / "dataset_info.json"
    what, fix = f"{path} was altered since the run started", "Restore the file."
    if not path.exists():
        what = f"{path} is missing, and the data has other dataset info than when the run started"
        fix = "Restore the file, or the data."
    raise CheckpointError(what, given=f"sha256 {now}", allowed=f"sha256 {before}, recorded in the checkpoint", fix=fix)


def _sha256(dataset_info: Mapping[str, Any]) -> str:
    # The order of the names counts: a recipe may depend on it.
    return hashlib.sha256(json.dumps(dataset_info).encode()).hexdigest()
