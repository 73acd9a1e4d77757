"""The networks: torchvision's ResNets, and timm's where it is installed.

Legend: N images, H and W their height and width, C classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import torchvision.models as zoo
from torch import nn

from lockstep.errors import ConfigError
from lockstep.module.freeze import freeze
from lockstep.recipes.classify.config import ModelConfig


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """The network of the settings, freshly initialised, on the CPU: (N, 3, H, W) -> (N, C) logits.

    Raises:
        ConfigError: timm has no network of that name, or what shall be frozen is no part of it.
    """
    name = config.name
    if name.startswith("timm/"):
        model = _from_timm(name.removeprefix("timm/"), num_classes)
    else:
        model = getattr(zoo, name)(num_classes=num_classes, zero_init_residual=config.zero_init_residual)
    if config.freeze:
        freeze(model, backbone_of(model) if config.freeze == "backbone" else config.freeze)
    return model


def backbone_of(model: nn.Module) -> list[str]:
    """The names of all parameters but the head's.

    Raises:
        ConfigError: The network does not say what its head is.
    """
    head = getattr(model, "default_cfg", {}).get("classifier", "fc")  # timm's networks tell; ResNets call it fc
    heads: Sequence[str] = (head,) if isinstance(head, str) else head
    names = [name for name, _ in model.named_parameters()]
    backbone = [name for name in names if not any(name.startswith(f"{each}.") for each in heads)]
    if len(backbone) == len(names):
        raise ConfigError(
            "this network does not say what its head is, so freeze=backbone cannot tell",
            fix="give patterns of what shall stay as it is: model.freeze=[stem.*, stages.*]",
        )
    return backbone


def _from_timm(name: str, num_classes: int) -> nn.Module:
    try:
        import timm  # not a dependency: only who names one of its networks needs it
    except ImportError:
        raise ConfigError(
            f"timm/{name} needs timm, which is not installed", fix="pip install timm, or a ResNet: model.name=resnet34"
        ) from None
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        raise ConfigError(
            f"timm has no network called {name}",
            given=f"model.name=timm/{name}",
            nearest=f"timm/{near[0]}" if near else None,
        )
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes)
    return model


def frozen_row(model: nn.Module, *, weights: Path | None) -> str:
    """For the head of a run: how much stays as it is; empty if nothing.

    Args:
        model: Some of its parameters may be frozen.
        weights: The file that it starts from, if any.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    if not frozen:
        return ""
    trained = dict.fromkeys(
        name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad
    )
    shown = ", ".join(list(trained)[:4]) + (" …" if len(trained) > 4 else "")
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    still = sum(not module.training for module in norms)
    lines = [f"{frozen:,} of {total:,} parameters; trained: {shown}"]
    if still:
        lines.append(f"{still} of {len(norms)} batch norms keep their statistics")
    if weights is None:
        lines.append("what is frozen stays random: there is no model.weights")
    return "\n".join(lines)
