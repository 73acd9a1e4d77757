"""What a script can contain that cannot be exact, refused by name before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from samebits.errors import ConfigError


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Check that modules can be trained exactly.

    Raises:
        ConfigError: One is wrapped for another kind of training, or has a layer that depends on the number of ranks.
    """
    if not modules:
        raise ConfigError("there is no model", fix="Give exact(model, ...).")
    for module in modules:
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ConfigError(
                f"the model is wrapped by {type(module).__name__}",
                cause="It sums gradients over ranks, in an order that depends on their number.",
                fix=f"Give the model itself: leave out {type(module).__name__}(model).",
            )
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"the model is a {type(module).__name__}", allowed="torch.nn.Module", fix="Give a module."
            )
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ConfigError(
                    f"layer {name or type(module).__name__} is torch's SyncBatchNorm",
                    cause="Its statistics are summed in an order that depends on the number of ranks.",
                    fix="Leave out convert_sync_batchnorm: batch norm then uses each micro-batch's statistics.",
                )
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise ConfigError(
                    f"{name} has no shape yet",
                    cause="A lazy module takes its shapes from the first input.",
                    fix="Call the model once on an example before exact().",
                )
    if not any(parameter.requires_grad for module in modules for parameter in module.parameters()):
        raise ConfigError("no parameter of the model requires a gradient", fix="Unfreeze some: requires_grad_(True).")
