"""Build networks of torchvision and timm, with stochastic depth and frozen parts.

Legend: N images, H and W their height and width, C classes.
"""

from functools import partial
from typing import Any

import torchvision.models as zoo
from torch import nn

from samebits.errors import ConfigError
from samebits.recipes.backbones import check_timm, freeze_parts, torchvision_name
from samebits.recipes.classify.config import ModelConfig


def build_model(config: ModelConfig, num_classes: int) -> nn.Module:
    """Build and initialize a network on the CPU, with frozen parts: (N, 3, H, W) -> (N, C) logits.

    Raises:
        ConfigError: There is no network of that name, it has no stochastic depth, or a pattern of model.freeze matches
            nothing.
    """
    build: Any
    if config.is_timm:
        name = config.name.removeprefix("timm/")
        check_timm(name)
        import timm

        build = partial(timm.create_model, name, pretrained=False)
        option = "drop_path_rate"
    else:
        build = partial(zoo.get_model, torchvision_name(config.name))
        option = "stochastic_depth_prob"
    options = {option: config.drop_path} if config.drop_path else {}
    try:
        model: nn.Module = build(num_classes=num_classes, **options)
    except TypeError:
        raise ConfigError(
            f"{config.name} has no stochastic depth",
            given=f"model.drop_path={config.drop_path:g}",
            fix="Set model.drop_path=0, or model.name to a network that has it, such as timm/resnet34.",
        ) from None
    freeze_parts(model, config.freeze)
    return model
