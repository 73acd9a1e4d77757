"""Pretrained weights by name (`model.weights=pretrained`): published files in the caches of torchvision and timm.

A file is downloaded by the library's own function into its own cache, on rank 0 when a run starts. A file in the cache
is used without the network. Its SHA-256 is stored in `dataset_info.json`, whose digest is in the run's record.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from samebits.errors import CheckpointError, ConfigError, DataError
from samebits.recipes.classify.config import DataConfig
from samebits.recipes.classify.model import backbone_of, check_timm, torchvision_name
from samebits.recipes.listing import some
from samebits.storage.manifest import sha256_of_file
from samebits.storage.pretrained import load_pretrained, read_state

_FILE = "model.safetensors"  # on the Hugging Face Hub


class _Published(NamedTuple):
    """A published file: its path in the cache, where it is from, and what it was trained with."""

    path: Path
    source: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


def find_published(name: str) -> dict[str, Any]:
    """Find the weights of a network, as in `model.name`, in the cache, or download them into it.

    Returns:
        What `dataset_info.json` stores: source, SHA-256, mean and standard deviation.

    Raises:
        ConfigError: No weights of this network are published.
        DataError: They are not in the cache and cannot be downloaded.
    """
    found = _find(name)
    return {"source": found.source, "sha256": sha256_of_file(found.path), "mean": found.mean, "std": found.std}


def load_published(model: nn.Module, name: str, info: Mapping[str, Any], data: DataConfig) -> dict[str, str]:
    """Load the weights that `find_published` found, except a head of another size.

    Args:
        model: The network; changed in place.
        name: The setting `model.name`.
        info: The result of `find_published` when the run started.

    Returns:
        Rows for the run's header.

    Raises:
        CheckpointError: The cached file differs from the one the run started with, or belongs to another network.
    """
    found = _find(name)
    sha256 = sha256_of_file(found.path)
    if sha256 != info["sha256"]:
        raise CheckpointError(
            f"{found.path} is not the file that the run started with",
            given=f"SHA-256 {sha256}",
            allowed=f"SHA-256 {info['sha256']}",
            fix="Delete it from the cache, to download it again, or start a new run.",
        )
    state = read_state(found.path)
    shapes = {each: parameter.shape for each, parameter in model.named_parameters()}
    lacking = [each for each in backbone_of(model) if each not in state or state[each].shape != shapes[each]]
    if lacking:
        raise CheckpointError(
            f"{found.path} does not fit model.name={name}",
            given=f"without {some(lacking, 4)}",
            fix="Convert the file to the network's names, and set model.weights to the result.",
        )
    rows = load_pretrained(model, found.path)
    rows["source"] = f"{found.source}\nsha256 {sha256}"
    if (found.mean, found.std) != (data.mean, data.std):
        settings = f"data.mean={list(found.mean)} data.std={list(found.std)}".replace(" ", "").replace(
            "]data", "] data"
        )
        rows["normalization"] = f"warning: these weights were trained with another normalization: set {settings}"
    return rows


def _find(name: str) -> _Published:
    return _find_timm(name.removeprefix("timm/")) if name.startswith("timm/") else _find_torchvision(name)


def _find_torchvision(name: str) -> _Published:
    import torch
    import torchvision.models as zoo

    weights = zoo.get_model_weights(torchvision_name(name)).DEFAULT
    url, transforms = weights.url, weights.transforms()
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    # torch.hub's rule: the name of a published file has the first digits of its SHA-256.
    expected = re.search(r"-([a-f0-9]{8,})\.", path.name)
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(
                url, str(path), expected[1] if expected else None, progress=sys.stderr.isatty()
            )
        except (OSError, RuntimeError) as error:
            raise _not_downloaded(name, error, f"Download {url}\nto {path}") from error
    if expected and not sha256_of_file(path).startswith(expected[1]):
        raise DataError(
            f"{path} is damaged: its SHA-256 does not begin with {expected[1]}", fix=f"Download {url} again."
        )
    return _Published(path, url, tuple(transforms.mean), tuple(transforms.std))


def _find_timm(name: str) -> _Published:
    check_timm(name)
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        raise ConfigError(
            f"timm publishes no weights of {name} on the Hugging Face Hub",
            given=f"model.name=timm/{name} model.weights=pretrained",
            fix="Choose another network, or set model.weights to a file.",
        )
    import huggingface_hub  # a dependency of timm

    repository, file = config.hf_hub_id, config.hf_hub_filename or _FILE
    if not file.endswith(".safetensors"):
        raise ConfigError(
            f"timm publishes the weights of {name} as {file} only, not as .safetensors",
            fix="Choose another network, or set model.weights to a file.",
        )
    path = huggingface_hub.try_to_load_from_cache(repository, file)
    # Not a path: None, or a mark for a file that the Hub does not have.
    if not isinstance(path, str):
        try:
            path = huggingface_hub.hf_hub_download(repository, file)
        except (OSError, ValueError, RuntimeError) as error:  # the Hub's errors derive from these
            command = f"Run on a machine with a network: hf download {repository} {file}"
            raise _not_downloaded(f"timm/{name}", error, command) from error
    return _Published(Path(path), f"https://huggingface.co/{repository}/{file}", config.mean, config.std)


def _not_downloaded(name: str, error: Exception, otherwise: str) -> DataError:
    return DataError(
        f"the pretrained weights of {name} are not in the cache and can't be downloaded",
        cause=str(error).partition("\n")[0][:200] or type(error).__name__,
        fix=f"{otherwise}\nor set model.weights to a file.",
    )
