"""Activation checkpointing: modules that are recomputed in the backward pass (`activation_checkpointing`).

Between the passes, only a module's inputs are stored (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
2016). torch.utils.checkpoint restores the random state of the first pass. Buffers, such as batch norm's statistics, are
handled here: the recomputation starts from their values before the first pass and restores the current ones after it.
So no bit of the result changes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from samebits.errors import ConfigError


def checkpoint_activations(model: nn.Module, choice: bool | Sequence[str]) -> list[str]:
    """Recompute modules of a model, which is changed in place, in the backward pass; return their names.

    Raises:
        ConfigError: A pattern matches no module, or the model has no blocks.
    """
    if not choice:
        return []
    parts = innermost_blocks(model) if choice is True else _named(model, choice)
    if not parts:
        raise ConfigError(
            "activation_checkpointing=true found no blocks in this model: its layers are in plain sequences",
            fix="Set module names: activation_checkpointing=[NAME, NAME.*].",
        )
    for _, module in parts:
        module.forward = _twice(module, module.forward)
    return [name for name, _ in parts]


def _named(model: nn.Module, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    found: dict[str, nn.Module] = {}
    # A ModuleList is never called; its entries are.
    modules = {name: module for name, module in model.named_modules() if name and is_called(module)}
    for pattern in patterns:
        matching = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        if not matching:
            raise ConfigError(
                f"activation_checkpointing: the model has no module called {pattern}",
                allowed=", ".join(list(modules)[:12]) + (" ..." if len(modules) > 12 else ""),
                fix="Set activation_checkpointing to names of modules, or to true for the model's blocks.",
            )
        found |= matching
    # A module inside of another match would be computed three times.
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    return [(name, found[name]) for name in modules if name in outer]


def _twice(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Only the form without reentrant passes takes a `context_fn`.
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: _around(module), **kwargs
        )

    return run


def _around(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first pass and of its recomputation."""
    # Clones, since the first pass changes the buffers in place.
    before = [buffer.clone() for buffer in module.buffers()]

    @contextmanager
    def second() -> Iterator[None]:
        buffers = list(module.buffers())
        now = [buffer.clone() for buffer in buffers]
        with torch.no_grad():
            _fill(buffers, before)
        try:
            yield
        finally:
            with torch.no_grad():
                _fill(buffers, now)

    return nullcontext(), second()


def _fill(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


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
