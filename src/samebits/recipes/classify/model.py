"""Build networks of torchvision and timm, with stochastic depth and frozen parts.

Legend: N images, H and W their height and width, C classes.
"""

from functools import partial
from typing import Any

import torchvision.models as zoo
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import stochastic_depth

from samebits.errors import ConfigError
from samebits.recipes.backbones import check_timm, freeze_parts, torchvision_name
from samebits.recipes.classify.config import RESNETS, ModelConfig


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
    freeze_parts(model, config.freeze)
    return model


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
