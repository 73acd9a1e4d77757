"""Networks of torchvision and timm for all recipes: their names, pretrained weights, and feature maps.

Legend: N images, H and W their height and width, F channels of a feature map.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.errors import CheckpointError, ConfigError, DataError
from samebits.extras import require
from samebits.module.freeze import freeze
from samebits.recipes.listing import nearest_fix, some
from samebits.storage.manifest import sha256_of_file
from samebits.storage.pretrained import load_pretrained, read_state

# Normalization of bytes: (byte / 255 - mean) / std, with the mean and standard deviation of ImageNet.


MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def normalize(pixels: Tensor) -> Tensor:
    """Normalize (..., 3, H, W) uint8 (red, green, blue) to float32 of the same shape, on the same device."""
    mean = torch.tensor(MEAN, device=pixels.device).mul_(255).view(3, 1, 1)
    std = torch.tensor(STD, device=pixels.device).mul_(255).view(3, 1, 1)
    return pixels.to(torch.float32).sub_(mean).div_(std)


# Arguments that let a network of timm take images of any size, by kind: vision transformers, windowed ones, others.
_ANY_SIZE: tuple[dict[str, Any], ...] = (
    {"dynamic_img_size": True, "dynamic_img_pad": True},
    {"strict_img_size": False},
    {},
)
FINEST = 4  # stride of the merged feature map


class Backbone(nn.Module):
    """A network of timm as feature maps of decreasing resolution. Its tensors have timm's names, below `net`.

    Args:
        name: Name of a network in timm, with or without `timm/`.

    Raises:
        ConfigError: timm is not installed, or it has no such network, or the network gives no feature maps.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        name = name.removeprefix("timm/")
        check_timm(name)
        self.net: Any = _create(name)
        if not hasattr(self.net, "forward_intermediates"):
            raise ConfigError(
                f"timm/{name} gives no feature maps",
                fix="Choose another network, such as timm/convnext_atto or timm/resnet18.",
            )
        # The last map of each stride: a vision transformer has one stride, and many maps.
        deepest = {each["reduction"]: index for index, each in enumerate(self.net.feature_info)}
        self.indices = [index for stride, index in deepest.items() if stride >= FINEST]
        self.widths = [int(self.net.feature_info[index]["num_chs"]) for index in self.indices]
        # The layers behind the last map would never get a gradient.
        self.net.prune_intermediate_layers(self.indices, prune_norm=False, prune_head=True)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Compute the (N, F, h, w) maps of (N, 3, H, W) normalized images, finest first."""
        maps: list[Tensor] = self.net.forward_intermediates(
            images, indices=self.indices, norm=True, output_fmt="NCHW", intermediates_only=True
        )
        return maps


class Pyramid(nn.Module):
    """The feature maps of a backbone, merged at 1/4 of the image.

    A 1x1 convolution of each map, resized and added, then a 3x3 convolution: the plain form of Kirillov et al.,
    "Panoptic Feature Pyramid Networks", CVPR 2019.

    Args:
        name: As of `Backbone`.
        width: Channels of the merged map.
    """

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.backbone = Backbone(name)
        self.lateral = nn.ModuleList(nn.Conv2d(each, width, 1) for each in self.backbone.widths)
        self.merge = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Compute (N, width, H // 4, W // 4) features of (N, 3, H, W) normalized images."""
        size = (images.shape[-2] // FINEST, images.shape[-1] // FINEST)
        total: Tensor | None = None
        for lateral, features in zip(self.lateral, self.backbone(images), strict=True):
            resized = F.interpolate(lateral(features), size, mode="bilinear", align_corners=False)
            total = resized if total is None else total + resized
        merged: Tensor = self.merge(total)
        return merged


def _create(name: str) -> Any:
    """Build a network of timm without a head, for images of any size if its kind can."""
    import timm

    for options in _ANY_SIZE:
        try:
            model: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, **options)
        except TypeError:  # no network of this kind takes these arguments
            continue
        return model
    raise ConfigError(
        f"timm/{name} can't be built without a head",
        fix="Choose another network, such as timm/convnext_atto or timm/resnet18.",
    )


def find_backbone(model: nn.Module) -> Backbone | None:
    """Return the backbone inside of a recipe's network, or None if it has none."""
    return next((each for each in model.modules() if isinstance(each, Backbone)), None)


def freeze_parts(model: nn.Module, patterns: str | Sequence[str]) -> None:
    """Freeze what the setting `model.freeze` names: patterns of parameters, or `backbone`, all but the head.

    Raises:
        ConfigError: A pattern matches nothing, or the head of the network is unknown.
    """
    if patterns == "backbone":
        backbone = find_backbone(model)
        if backbone is None:
            patterns = backbone_of(model)
        else:
            patterns = [name for name, each in model.named_modules() if each is backbone]
    if patterns:
        freeze(model, patterns)


def published_info(name: str, weights: object) -> dict[str, Any]:
    """Return what `dataset_info.json` stores of published weights: an entry with `model.weights=pretrained`."""
    return {"weights": find_published(name)} if weights == "pretrained" else {}


def initial_weights(
    weights: str | Path | None,
    name: str,
    dataset_info: Mapping[str, Any],
    *,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> Callable[[nn.Module], Mapping[str, str]] | None:
    """Return the function that loads the weights of the setting `model.weights`, or None if there are none."""
    if weights == "pretrained":
        return partial(load_published, name=name, info=dataset_info["weights"], mean=mean, std=std)
    return None if weights is None else partial(_load_file, path=Path(weights))


def _load_file(model: nn.Module, path: Path) -> dict[str, str]:
    backbone = find_backbone(model)
    if backbone is not None and {*backbone.net.state_dict()} & {*read_state(path.expanduser())}:
        return load_pretrained(backbone.net, path)
    return load_pretrained(model, path)


def check_timm(name: str) -> None:
    """Check that timm is installed and has a network."""
    require("timm", f"model.name=timm/{name}")
    import timm

    if not timm.is_model(name):
        raise ConfigError(
            f"timm has no network called {name}",
            given=f"model.name=timm/{name}",
            fix=nearest_fix(
                name, timm.list_models(), "See timm.list_models() for the names.", "Use timm/{}."
            ),
        )


def torchvision_name(name: str) -> str:
    """Return the name of a network in torchvision, from the setting model.name.

    Raises:
        ConfigError: torchvision has no such network, or it has several outputs.
    """
    name = name.removeprefix("torchvision/")
    import torchvision.models as zoo

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
    lines = [f"{frozen:,} of {total:,} parameters; trained: {some(list(trained), 4)}"]
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
    model: nn.Module,
    name: str,
    info: Mapping[str, Any],
    *,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> dict[str, str]:
    """Load the weights that `find_published` found, except a head of another size.

    Args:
        model: The network, or one on a `Backbone`; changed in place.
        name: The setting `model.name`.
        info: The result of `find_published` when the run started.
        mean: Of the recipe's normalization, by color.
        std: Likewise.

    Returns:
        Rows for the run's header.

    Raises:
        CheckpointError: The cached file differs from the one the run started with, or belongs to another network.
    """
    found = _find(name)
    backbone = find_backbone(model)
    net = model if backbone is None else backbone.net
    required = backbone_of(net) if backbone is None else dict(net.named_parameters())
    sha256 = sha256_of_file(found.path)
    if sha256 != info["sha256"]:
        raise CheckpointError(
            f"{found.path} is not the file that the run started with",
            given=f"SHA-256 {sha256}",
            allowed=f"SHA-256 {info['sha256']}",
            fix="Delete it from the cache, to download it again, or start a new run.",
        )
    state = read_state(found.path)
    shapes = {each: parameter.shape for each, parameter in net.named_parameters()}
    lacking = [each for each in required if each not in state or state[each].shape != shapes[each]]
    if lacking:
        raise CheckpointError(
            f"{found.path} does not fit model.name={name}",
            given=f"without {some(lacking, 4)}",
            fix="Convert the file to the network's names, and set model.weights to the result.",
        )
    rows = load_pretrained(net, found.path)
    rows["source"] = f"{found.source}\nsha256 {sha256}"
    if (found.mean, found.std) != (tuple(mean), tuple(std)):
        found_mean, found_std = (",".join(map(str, each)) for each in (found.mean, found.std))
        rows["normalization"] = (
            "warning: these weights were trained with another normalization: "
            f"set data.mean=[{found_mean}] data.std=[{found_std}]"
        )
    return rows


def _find(name: str) -> _Published:
    return (
        _find_timm(name.removeprefix("timm/"))
        if name.startswith("timm/")
        else _find_torchvision(name)
    )


def _find_torchvision(name: str) -> _Published:
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
