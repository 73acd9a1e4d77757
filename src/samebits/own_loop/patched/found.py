"""What of a script only the garbage collector knows: the modules that it trains, and averages of their weights."""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from samebits.own_loop.weights import trained_shapes

_MOVES = ("update", "update_parameters", "step")


def trained_modules(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules with parameters of the optimizers, without what wraps them.

    Behind them those that list `averaged_buffers`, such as a loss that keeps a center.
    """
    every = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    numbers = {id(each): number for number, each in enumerate(every)}
    found: dict[int, tuple[int, nn.Module]] = {}  # by identity, with the number of the first parameter
    for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:  # runs no code of others
        module = _unwrapped(module)
        own = [numbers[id(each)] for each in module.parameters() if id(each) in numbers]
        if own or hasattr(type(module), "averaged_buffers"):
            found[id(module)] = min(own, default=len(every)), module
    inner = {id(each) for _, module in found.values() for each in list(module.modules())[1:]}
    # In the order of the optimizers, which is equal on all ranks.
    return [module for _, module in sorted(found.values(), key=lambda each: each[0]) if id(module) not in inner]


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what DistributedDataParallel, DataParallel or torch.compile have wrapped."""
    while isinstance(module, DistributedDataParallel | DataParallel) or hasattr(module, "_orig_mod"):
        module = getattr(module, "_orig_mod", None) or module.module  # type: ignore[assignment]
    return module


def averages(models: Sequence[nn.Module]) -> list[tuple[Any, list[Tensor]]]:
    """Return objects that average the weights of models, such as timm's ModelEma, with the tensors that they keep.

    They are known by their class, which has "ema" or "average" in its name and update() or the like, and by their
    tensors, which have the shapes of all trained parameters. Scripts have classes of their own for it.
    """
    own = {id(each) for model in models for each in model.parameters()}
    found = []
    for each in gc.get_objects():
        name = type(each).__name__.lower()
        if ("ema" in name or "average" in name) and any(hasattr(type(each), method) for method in _MOVES):
            kept = [tensor for tensor in _kept(getattr(each, "__dict__", {})) if id(tensor) not in own]
            if trained_shapes(models) <= Counter(tensor.shape for tensor in kept):
                found.append((each, kept))
    return found


def _kept(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _kept(each)
