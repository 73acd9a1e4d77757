"""`samebits pull`: a published model as a run folder, for predict, eval and export."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from samebits.config.plain_file import parse_json, read_plain
from samebits.errors import CheckpointError, ConfigError, cannot_write_result
from samebits.extras import require
from samebits.inference.hub import repository as names
from samebits.inference.hub.push import check_empty
from samebits.recipes.catalog import find, list_recipes
from samebits.scratch import scratch_folder

_WEIGHTS = "weights.safetensors"


def pull(source: str, out: Path) -> Path:
    """Copy a model that `samebits push` published, after checking its files. No code of it is run.

    Args:
        source: The folder of a model repository; or `hf://OWNER/NAME[@REVISION]`, which uses the network.
        out: Folder for the model; it must not exist or be empty.

    Returns:
        The folder.

    Raises:
        CheckpointError: A file is missing, or the weights are not those of `provenance.json`.
        ConfigError: The folder is not empty, the download fails, or the recipe is not part of Samebits.
    """
    out = Path(out).expanduser()
    check_empty(out)
    remote = names.hub_name(source)
    folder = Path(source).expanduser() if remote is None else _download(remote)
    if not folder.is_dir():
        raise CheckpointError(
            f"{source} is not a folder", fix="Give the folder of a model repository, or hf://OWNER/NAME."
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out.parent) as scratch:
            model = scratch / "model"
            model.mkdir()
            for name in names.FILES:
                _copy(
                    folder / name,
                    model / (_WEIGHTS if name == names.MODEL else name),
                    is_link_allowed=remote is not None,
                )
            _check(model, source)
            if out.exists():
                out.rmdir()
            os.rename(model, out)
    except OSError as error:
        raise cannot_write_result(out, error) from None
    return out


def _copy(source: Path, target: Path, *, is_link_allowed: bool) -> None:
    # The Hub's cache consists of links to its own files.
    if not source.is_file() or (source.is_symlink() and not is_link_allowed):
        raise CheckpointError(
            f"{source} is missing, or is not a regular file",
            fix="Give a repository that samebits push wrote.",
        )
    shutil.copyfile(source, target)


def _check(model: Path, source: str) -> None:
    try:
        statement = parse_json(read_plain(model / names.PROVENANCE))
        expected = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}[_WEIGHTS]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{names.PROVENANCE} of {source} can't be read", cause=str(error)[:200], fix="Pull from another source."
        ) from error
    with (model / _WEIGHTS).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"the weights of {source} are not those of its {names.PROVENANCE}",
            given=f"SHA-256 {found}",
            allowed=f"SHA-256 {expected}",
            fix="Pull it again, or from another source.",
        )
    recipe = find(str(model / names.SETTINGS)).recipe
    if recipe not in list_recipes():
        raise ConfigError(
            f"{source} was trained with the recipe {recipe}, which is not part of Samebits",
            fix="Update Samebits, or pull another model.",
        )


def _download(remote: names.HubName) -> Path:
    require("hub", "samebits pull hf://")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                remote.repository, revision=remote.revision, allow_patterns=[*names.FILES]
            )
        )
    except (OSError, ValueError, RuntimeError) as error:  # the Hub's errors derive from these
        raise ConfigError(
            f"{remote.repository} can't be downloaded",
            cause=str(error).partition("\n")[0][:200] or type(error).__name__,
            fix="Check the name and the network.",
        ) from error
