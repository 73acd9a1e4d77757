"""Blocks of a model: the units of activation checkpointing."""

from torch import nn


def innermost_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the smallest modules with several layers and a forward of their own, such as residual blocks.

    A Sequential is not a block. A model whose layers are only in Sequentials has none.

    Returns:
        (name, module) of each block, in the model's order.
    """
    composite = [
        (name, module) for name, module in model.named_modules() if name and _is_composite(module)
    ]
    return [
        (name, module)
        for name, module in composite
        if not any(_is_composite(inside) for inside in module.modules() if inside is not module)
    ]


def _is_composite(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return has_children and is_called(module) and not isinstance(module, nn.Sequential)


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward pass. ModuleList and ModuleDict have none."""
    return type(module).forward is not nn.Module.forward
