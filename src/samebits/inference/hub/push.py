"""`samebits push`: write a trained model as a repository in Hugging Face's format, or upload it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from samebits.config.plain_file import parse_json, read_plain
from samebits.errors import CheckpointError, ConfigError, cannot_write_result
from samebits.extras import require
from samebits.inference.hub import repository as names
from samebits.inference.hub.card import write_card
from samebits.inference.trained_model import TrainedModel
from samebits.recipes.catalog import list_recipes
from samebits.scratch import scratch_folder

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig
    from samebits.engine.parts import Parts

# Lists of files in a recipe's dataset info. They are not published: prediction does not need them.
_FILE_LISTS = ("train", "held_out", "eval_sets", "skipped")


def push(run: Path, target: str) -> str:
    """Publish the final weights of a run with card, preprocessing and provenance.

    Args:
        run: The run folder.
        target: A folder that does not exist or is empty; or `hf://OWNER/NAME`, which uses the network.

    Returns:
        The folder, or the address of the repository.

    Raises:
        CheckpointError: The run is not complete, or was altered.
        ConfigError: The recipe is a file of the user, the folder is not empty, or the upload fails.
    """
    require("hub", "samebits push")
    remote = names.hub_name(target)
    if remote is None:
        out = Path(target).expanduser()
        check_empty(out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with scratch_folder(out.parent) as folder:
                _write(run, folder / "model")
                if out.exists():
                    out.rmdir()
                os.rename(folder / "model", out)
        except OSError as error:
            raise cannot_write_result(out, error) from None
        return str(out)
    with scratch_folder(Path(run)) as folder:
        _write(run, folder / "model")
        return _upload(folder / "model", remote)


def check_empty(folder: Path) -> None:
    """Check that a folder for results does not exist or is empty.

    Raises:
        ConfigError: It has content, or is a file.
    """
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder", fix="Give another name.")


def _write(run: Path, folder: Path) -> None:
    from samebits.engine.build import build_parts
    from samebits.engine.dataset_info import build_from, read_dataset_info
    from samebits.storage.run_weights import is_as_recorded

    trained = TrainedModel(Path(run))
    found, config = trained.settings()
    if config.recipe not in list_recipes():
        raise ConfigError(
            f"{run} was trained with the recipe file {config.recipe}, and push publishes no code",
            fix="Export the weights instead: samebits export RUN.",
        )
    trained.check_settings(found)
    if not is_as_recorded(run):
        raise CheckpointError(
            f"{run} has no final weights with a matching result.json",
            fix=f"Run samebits train --run-dir {run} --resume auto.",
        )
    info = read_dataset_info(run) or {}
    parts = build_parts(config, lambda: build_from(found, config, info, run))
    result = parse_json(read_plain(run / names.RESULT))
    folder.mkdir()
    shutil.copyfile(run / "weights.safetensors", folder / names.MODEL)
    shutil.copyfile(run / names.PROVENANCE, folder / names.PROVENANCE)
    shutil.copyfile(run / names.RESULT, folder / names.RESULT)
    settings = yaml.safe_load(read_plain(run / names.SETTINGS))
    (folder / names.SETTINGS).write_text(yaml.safe_dump(_without_folders(settings), sort_keys=False), encoding="utf-8")
    _write_json(folder / names.INFO, {name: _published(name, value) for name, value in info.items()})
    _write_json(folder / names.CONFIG, _network(config, parts))
    _write_json(folder / names.PREPROCESSOR, _preprocessing(config, parts))
    write_card(folder / names.CARD, config, parts, result)


def _published(name: str, value: Any) -> Any:
    if name == "held_out_from":
        return None
    return type(value)() if name in _FILE_LISTS and isinstance(value, dict | list) else value


def _without_folders(value: Any) -> Any:
    """Reduce absolute paths in settings to their last part: they name folders of this machine."""
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value


def _network(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """Describe the network: in timm's format, so that timm can load its own networks."""
    model = getattr(config, "model", None)
    name = str(getattr(model, "name", config.recipe))
    classes = list(parts.metadata.get("classes", ()))
    described = {
        "architecture": name.removeprefix("timm/"),
        "num_classes": len(classes),
        "label_names": classes,
        "id2label": {str(index): label for index, label in enumerate(classes)},
        "recipe": config.recipe,
        "library_name": "timm" if name.startswith("timm/") else "samebits",
    }
    if parts.input_shape is not None and _is_color(parts):
        described["pretrained_cfg"] = {
            "input_size": list(parts.input_shape),
            "mean": list(parts.metadata["mean"]),
            "std": list(parts.metadata["std"]),
            "interpolation": "bilinear",
            "crop_pct": parts.input_shape[-1] / _resize_px(config, parts.input_shape[-1]),
            "num_classes": len(classes),
            "label_names": classes,
        }
    return described


def _preprocessing(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """Describe resizing, crop and normalization as transformers' image processors do."""
    if parts.input_shape is None or not _is_color(parts):
        return {"input_shape": parts.input_shape, **parts.metadata}
    size_px = parts.input_shape[-1]
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": _resize_px(config, size_px)},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": size_px, "width": size_px},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(parts.metadata["mean"]),
        "image_std": list(parts.metadata["std"]),
        "do_convert_rgb": True,
    }


def _is_color(parts: Parts) -> bool:
    """Return whether the input is an image that is resized, cropped and normalized for each of three colors."""
    mean = parts.metadata.get("mean")
    return isinstance(mean, list | tuple) and len(mean) == 3


def _resize_px(config: RunConfig, size_px: int) -> int:
    return getattr(getattr(config, "data", None), "eval_resize_px", None) or round(size_px * 256 / 224)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _upload(folder: Path, remote: names.HubName) -> str:
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(remote.repository, exist_ok=True)
        api.upload_folder(
            repo_id=remote.repository,
            folder_path=folder,
            revision=remote.revision,
            commit_message="Upload a model trained with Samebits",
        )
    except (OSError, ValueError, RuntimeError) as error:  # the Hub's errors derive from these
        raise ConfigError(
            f"the model can't be uploaded to {remote.repository}",
            cause=str(error).partition("\n")[0][:200] or type(error).__name__,
            fix="Check the network and log in with hf auth login; or push to a folder.",
        ) from error
    return f"https://huggingface.co/{remote.repository}"
