"""Build networks of torchvision, and of timm if it is installed.

Legend: N images, H and W their height and width, C classes.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torchvision.models as zoo
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import stochastic_depth

from samebits.errors import CheckpointError, ConfigError, DataError
from samebits.extras import pip_line
from samebits.module.freeze import freeze
from samebits.recipes.classify.config import RESNETS, DataConfig, ModelConfig
from samebits.recipes.listing import nearest_fix, some
from samebits.storage.manifest import sha256_of_file
from samebits.storage.pretrained import load_pretrained, read_state


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """Build and initialize a network on the CPU, with frozen parts: (N, 3, H, W) -> (N, C) logits.

    Raises:
        ConfigError: There is no network of that name, it has no stochastic depth, or a pattern of model.freeze matches
            nothing.
    """
    name = config.name
    if name.startswith("timm/"):
        model = _from_timm(name.removeprefix("timm/"), num_classes, config.drop_path)
    elif name.startswith("torchvision/"):
        model = _from_torchvision(torchvision_name(name), num_classes, config.drop_path)
    else:
        model = getattr(zoo, name)(num_classes=num_classes)
        if config.drop_path:
            drop_residual_blocks(model, config.drop_path)
    if config.freeze:
        freeze(model, backbone_of(model) if config.freeze == "backbone" else config.freeze)
    return model


def backbone_of(model: nn.Module) -> list[str]:
    """Return the names of all parameters except those of the head.

    Raises:
        ConfigError: The head of the network is unknown.
    """
    # timm's models declare it; in torchvision's it has one of these names.
    head = getattr(model, "default_cfg", {}).get(
        "classifier", ("fc", "classifier", "heads", "head")
    )
    heads: Sequence[str] = (head,) if isinstance(head, str) else head
    names = [name for name, _ in model.named_parameters()]
    backbone = [name for name in names if not any(name.startswith(f"{each}.") for each in heads)]
    if len(backbone) == len(names):
        raise ConfigError(
            f"model.freeze=backbone is not possible: the head of this {type(model).__name__} is unknown",
            fix="Set patterns of the parameters to freeze, such as model.freeze=[stem.*, stages.*].",
        )
    return backbone


def torchvision_name(name: str) -> str:
    """Return the name of a network in torchvision, from the setting model.name.

    Raises:
        ConfigError: torchvision has no such network, or it has several outputs.
    """
    name = name.removeprefix("torchvision/")
    # These return several outputs in training.
    known = [
        each for each in zoo.list_models(module=zoo) if each not in ("googlenet", "inception_v3")
    ]
    if name not in known:
        raise ConfigError(
            f"torchvision has no network called {name} with one output",
            given=f"model.name=torchvision/{name}",
            fix=nearest_fix(
                name,
                known,
                "See torchvision.models.list_models() for the names.",
                "Use torchvision/{}.",
            ),
        )
    return name


def _from_torchvision(name: str, num_classes: int, drop_path: float) -> nn.Module:
    is_resnet = name in RESNETS
    options: dict[str, Any] = (
        {"stochastic_depth_prob": drop_path} if drop_path and not is_resnet else {}
    )
    try:
        model: nn.Module = zoo.get_model(name, num_classes=num_classes, **options)
    except TypeError:
        raise _no_drop_path(f"torchvision/{name}", drop_path) from None
    if drop_path and is_resnet:
        drop_residual_blocks(model, drop_path)
    return model


def _no_drop_path(name: str, drop_path: float) -> ConfigError:
    return ConfigError(
        f"{name} has no stochastic depth",
        given=f"model.drop_path={drop_path:g}",
        fix="Set model.drop_path=0.",
    )


def drop_residual_blocks(model: nn.Module, probability: float) -> None:
    """Let samples skip residual branches in training: stochastic depth, which torchvision's ResNets do not have.

    Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, with the scaling in training of timm and
    torchvision's `StochasticDepth`. The random numbers come from torch's generator, which is seeded for each
    micro-batch. Names of parameters and results in evaluation do not change.

    Args:
        model: A ResNet of torchvision; changed in place.
        probability: Of the last block. It rises linearly from 0 at the first one.
    """
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    for index, block in enumerate(blocks):
        norm = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        norm.register_forward_hook(
            partial(_drop, probability=probability * index / max(1, len(blocks) - 1))
        )


def _drop(
    norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, *, probability: float
) -> Tensor:
    """Drop the residual branch, (N, C, H, W), of some samples."""
    dropped: Tensor = stochastic_depth(output, probability, mode="row", training=norm.training)
    return dropped


def check_timm(name: str) -> None:
    """Check that timm is installed and has a network."""
    try:
        import timm  # an optional dependency
    except ImportError:
        raise ConfigError(
            f"model.name=timm/{name} requires timm, which is not installed",
            fix=f"Run {pip_line('timm')}, or set model.name=resnet34.",
        ) from None
    if not timm.is_model(name):
        raise ConfigError(
            f"timm has no network called {name}",
            given=f"model.name=timm/{name}",
            fix=nearest_fix(
                name, timm.list_models(), "See timm.list_models() for the names.", "Use timm/{}."
            ),
        )


def _from_timm(name: str, num_classes: int, drop_path: float) -> nn.Module:
    check_timm(name)
    import timm

    options: dict[str, Any] = {"drop_path_rate": drop_path} if drop_path else {}
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=False, num_classes=num_classes, **options
        )
    except TypeError:
        raise _no_drop_path(f"timm/{name}", drop_path) from None
    return model


def frozen_row(model: nn.Module, *, weights: str | Path | None) -> str:
    """Describe the frozen parameters, for the header of a run; empty if there are none. `weights` is the setting."""
    total = sum(parameter.numel() for parameter in model.parameters())
    frozen = sum(
        parameter.numel() for parameter in model.parameters() if not parameter.requires_grad
    )
    if not frozen:
        return ""
    trained = dict.fromkeys(
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    # The base class of all batch norms has no public name.
    norms = [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    still = sum(not module.training for module in norms)
    lines = [f"{frozen:,} of {total:,} parameters; trained: {some(list(trained), 4)}"]
    if still:
        lines.append(f"{still} of {len(norms)} batch norms keep their statistics")
    if weights is None:
        lines.append("warning: frozen parameters stay random, because model.weights is null")
    return "\n".join(lines)


# Pretrained weights by name (`model.weights=pretrained`): published files in the caches of torchvision and timm.
#
# A file is downloaded by the library's own function into its own cache, on rank 0 when a run starts. A file in the
# cache is used without the network. Its SHA-256 is stored in `dataset_info.json`, whose digest is in the run's
# record.


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
    return {
        "source": found.source,
        "sha256": sha256_of_file(found.path),
        "mean": found.mean,
        "std": found.std,
    }


def load_published(
    model: nn.Module, name: str, info: Mapping[str, Any], data: DataConfig
) -> dict[str, str]:
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
    lacking = [
        each
        for each in backbone_of(model)
        if each not in state or state[each].shape != shapes[each]
    ]
    if lacking:
        raise CheckpointError(
            f"{found.path} does not fit model.name={name}",
            given=f"without {some(lacking, 4)}",
            fix="Convert the file to the network's names, and set model.weights to the result.",
        )
    rows = load_pretrained(model, found.path)
    rows["source"] = f"{found.source}\nsha256 {sha256}"
    if (found.mean, found.std) != (data.mean, data.std):
        settings = f"data.mean={list(found.mean)} data.std={list(found.std)}".replace(
            " ", ""
        ).replace("]data", "] data")
        rows["normalization"] = (
            f"warning: these weights were trained with another normalization: set {settings}"
        )
    return rows


def _find(name: str) -> _Published:
    return (
        _find_timm(name.removeprefix("timm/"))
        if name.startswith("timm/")
        else _find_torchvision(name)
    )


def _find_torchvision(name: str) -> _Published:
    import torch
    import torchvision.models as zoo

    weights = zoo.get_model_weights(torchvision_name(name)).DEFAULT
    url = weights.url
    transforms = weights.transforms()
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
            f"{path} is damaged: its SHA-256 does not begin with {expected[1]}",
            fix=f"Download {url} again.",
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

    repository = config.hf_hub_id
    file = config.hf_hub_filename or _FILE
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
    return _Published(
        Path(path), f"https://huggingface.co/{repository}/{file}", config.mean, config.std
    )


def _not_downloaded(name: str, error: Exception, otherwise: str) -> DataError:
    return DataError(
        f"the pretrained weights of {name} are not in the cache and can't be downloaded",
        cause=str(error).partition("\n")[0][:200] or type(error).__name__,
        fix=f"{otherwise}\nor set model.weights to a file.",
    )
