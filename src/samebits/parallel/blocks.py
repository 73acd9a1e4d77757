"""Blocks of a model: the units of sharding (FSDP) and of activation checkpointing."""

from collections.abc import Iterator

from torch import nn

# Shares of a model's parameters: a block above the first is split further, one below the second is no unit of its own.
LARGEST = 1 / 8
SMALLEST = 1 / 100


def count(module: nn.Module) -> int:
    """Return a module's number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def shard_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Choose the modules whose parameters are gathered together for their forward or backward pass.

    No block is inside another. A module can be one only if it is certain to be called: by its own forward, or as an
    entry of a Sequential. Parameters outside of all blocks are gathered for the whole pass.

    Returns:
        (name, module) of each block, in the model's order.
    """
    # By identity, since a model may use one module at several places.
    return list(
        {id(module): (name, module) for name, module in _split(model, "", count(model))}.values()
    )


def _split(parent: nn.Module, prefix: str, total: int) -> Iterator[tuple[str, nn.Module]]:
    for name, module in parent.named_children():
        size = count(module)
        full_name = prefix + name
        has_children = next(module.children(), None) is not None
        inner = list(_split(module, f"{full_name}.", total)) if has_children else []
        # A large block stays one unit if its parts contain less than half of its parameters.
        if not is_called(module) or (
            size > LARGEST * total and 2 * sum(count(part) for _, part in inner) > size
        ):
            yield from inner
        elif size >= SMALLEST * total and (has_children or isinstance(parent, nn.Sequential)):
            yield full_name, module


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
