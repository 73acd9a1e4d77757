"""Build networks: the ResNets of torchvision, and the networks of timm if it is installed.

Legend: N images, H and W their height and width, C classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import torchvision.models as zoo
from torch import nn

from lockstep.errors import ConfigError
from lockstep.extras import pip_line
from lockstep.module.freeze import freeze
from lockstep.recipes.classify.config import ModelConfig


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """Build and initialize a network on the CPU: (N, 3, H, W) -> (N, C) logits.

    Args:
        config: The network, and which parameters are frozen.
        num_classes: C.

    Raises:
        ConfigError: timm has no network of that name, or a pattern of model.freeze matches nothing.
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
    """Return the names of all parameters except those of the head.

    Raises:
        ConfigError: The head of the network is unknown.
    """
    head = getattr(model, "default_cfg", {}).get(
        "classifier", "fc"
    )  # timm models declare it; in torchvision's ResNets it is fc
    heads: Sequence[str] = (head,) if isinstance(head, str) else head
    names = [name for name, _ in model.named_parameters()]
    backbone = [name for name in names if not any(name.startswith(f"{each}.") for each in heads)]
    if len(backbone) == len(names):
        raise ConfigError(
            f"model.freeze=backbone is not possible: the head of this {type(model).__name__} is unknown",
            fix="Set patterns of the parameters to freeze, such as model.freeze=[stem.*, stages.*].",
        )
    return backbone


def _from_timm(name: str, num_classes: int) -> nn.Module:
    try:
        import timm  # an optional dependency
    except ImportError:
        raise ConfigError(
            f"model.name=timm/{name} requires timm, which is not installed",
            fix=f"Run {pip_line('timm')}, or set model.name=resnet34.",
        ) from None
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        raise ConfigError(
            f"timm has no network called {name}",
            given=f"model.name=timm/{name}",
            fix=f"Use timm/{near[0]}." if near else "See timm.list_models() for the names.",
        )
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes)
    return model


def frozen_row(model: nn.Module, *, weights: Path | None) -> str:
    """Describe the frozen parameters, for the header of a run; empty if there are none.

    Args:
        model: The network.
        weights: The file of pretrained weights, if any.
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
        lines.append("warning: frozen parameters stay random, because model.weights is null")
    return "\n".join(lines)
