"""What of a script only the garbage collector knows: the modules that it trains, and what acts once a step."""

import gc
from collections.abc import Sequence
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samebits.bits import parts_of
from samebits.own_loop.weights import hold_average

_MOVES = ("update", "update_parameters", "step")


def trained_modules(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules with parameters of the optimizers, without what wraps them.

    Behind them those that list `averaged_buffers`, such as a loss that keeps a center.
    """
    every = [
        each
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    ]
    numbers = {id(each): number for number, each in enumerate(every)}
    found: dict[
        int, tuple[int, nn.Module]
    ] = {}  # by identity, with the number of the first parameter
    for module in [
        each for each in gc.get_objects() if issubclass(type(each), nn.Module)
    ]:  # runs no code of others
        module = _unwrapped(module)
        own = [numbers[id(each)] for each in module.parameters() if id(each) in numbers]
        if own or hasattr(type(module), "averaged_buffers"):
            found[id(module)] = min(own, default=len(every)), module
    inner = {id(each) for _, module in found.values() for each in list(module.modules())[1:]}
    # In the order of the optimizers, which is equal on all ranks.
    return [
        module
        for _, module in sorted(found.values(), key=lambda each: each[0])
        if id(module) not in inner
    ]


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what DistributedDataParallel, DataParallel or torch.compile have wrapped."""
    while isinstance(module, DistributedDataParallel | DataParallel) or hasattr(
        module, "_orig_mod"
    ):
        module = getattr(module, "_orig_mod", None) or module.module  # type: ignore[assignment]
    return module


def followers(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[tuple[Any, list[Tensor]]]:
    """Return objects of classes of a script's own that act once a step, and the tensors that they keep.

    Averages of a model's weights, such as timm's ModelEma, have "ema" or "average" in their class's name, update() or
    the like, and tensors with the shapes of all its trained parameters. Schedulers have "sched" or "LR" in it, one of
    the optimizers, and a step() that calls no other step().
    """
    own = {id(each) for model in models for each in model.parameters()}
    trained = {
        id(each)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    }
    found: list[tuple[Any, list[Tensor]]] = []
    for each in gc.get_objects():
        # runs no code of others, as an attribute may
        kind = type(each)
        name = type(each).__name__.lower()
        if ("ema" in name or "average" in name) and any(hasattr(kind, method) for method in _MOVES):
            kept = [
                tensor for tensor in _kept(getattr(each, "__dict__", {})) if id(tensor) not in own
            ]
            if hold_average(
                models, lambda each: id(each) in trained, (tensor.shape for tensor in kept)
            ):
                found.append((each, kept))
        elif ("sched" in name or "LR" in kind.__name__) and not issubclass(kind, LRScheduler):
            code = getattr(getattr(kind, "step", None), "__code__", None)
            is_own = isinstance(code, CodeType) and "step" not in code.co_names
            if is_own and any(
                part is known
                for part in getattr(each, "__dict__", {}).values()
                for known in optimizers
            ):
                found.append((each, []))
    return found


def _kept(value: Any) -> list[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return (
        [value]
        if isinstance(value, Tensor)
        else [tensor for part in parts_of(value) for tensor in _kept(part)]
    )
