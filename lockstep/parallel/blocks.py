"""The parts of a model that are held, or gone through again, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# Shares of a model's parameters: a block above the first is looked into, one below the second is left to the rest.
LARGEST, SMALLEST = 1 / 8, 1 / 100


def count(module: nn.Module) -> int:
    """A module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def shard_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules, none inside of another, whose parameters are gathered together for their forward or backward pass.

    A module counts only if it is sure to be called as one: by its own forward, or as an entry of a Sequential. What is
    in none of them is gathered for the whole pass.

    Returns:
        (name, module), in the model's order.
    """
    return list({id(module): (name, module) for name, module in _cut(model, "", count(model))}.values())


def _cut(parent: nn.Module, prefix: str, total: int) -> Iterator[tuple[str, nn.Module]]:
    for name, module in parent.named_children():
        size, full_name = count(module), prefix + name
        has_children = next(module.children(), None) is not None
        inner = list(_cut(module, f"{full_name}.", total)) if has_children else []
        # Where its parts hold little of it, a large block is taken as it is.
        if not is_called(module) or (size > LARGEST * total and 2 * sum(count(part) for _, part in inner) > size):
            yield from inner
        elif size >= SMALLEST * total and (has_children or isinstance(parent, nn.Sequential)):
            yield full_name, module


def innermost_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The smallest modules that join several layers by a forward of their own, such as a ResNet's residual blocks.

    A Sequential is no block. Where nothing but Sequentials joins layers, there is none.

    Returns:
        (name, module), in the model's order.
    """
    joining = [(name, module) for name, module in model.named_modules() if name and _joins(module)]
    return [
        (name, module)
        for name, module in joining
        if not any(_joins(inside) for inside in module.modules() if inside is not module)
    ]


def _joins(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return has_children and is_called(module) and not isinstance(module, nn.Sequential)


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward pass at all; ModuleList and ModuleDict have none."""
    return type(module).forward is not nn.Module.forward
