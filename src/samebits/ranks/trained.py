"""What a script trains, as its optimizers show it: the modules, and their weights at the end."""

import gc
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class TrainedModules:
    """The modules whose parameters the script's optimizers update, found at each optimizer's first step.

    They are kept until the script ends, since its own names for them may be gone by then.

    Args:
        before_first: Called before the first step of all.
        after_step: Called after each step of the first optimizer.

    Attributes:
        num_steps: Steps of the first optimizer.
        first: The first optimizer.
    """

    def __init__(self, before_first: Callable[[], None], after_step: Callable[[], None]) -> None:
        self.num_steps = 0
        self.first: Optimizer | None = None
        self._before_first = before_first
        self._after_step = after_step
        self._optimizers: list[Optimizer] = []
        self._modules: list[nn.Module] = []
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self.first is None:
            self._before_first()
            self.first = optimizer
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
            known = {id(each) for each in self._modules}
            self._modules += [each for each in modules_of(optimizer) if id(each) not in known]

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is self.first:
            self.num_steps += 1
            self._after_step()

    def state(self) -> dict[str, Tensor]:
        """Return weights and buffers of all modules, of any shape, by name; whole ones also where they are sharded."""
        states = enumerate(module.state_dict() for module in self._modules)
        named = (
            (f"{i}.{name}" if i else name, value)
            for i, state in states
            for name, value in state.items()
        )
        return {name: _whole(value) for name, value in named if isinstance(value, Tensor)}


def modules_of(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules with parameters of an optimizer, without what wraps them, in the order of these."""
    numbers = {
        id(each): i
        for i, each in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    # by identity, with the number of the first parameter
    found: dict[int, tuple[int, nn.Module]] = {}
    # By type: isinstance() would ask each object for its __class__, which may run code.
    for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:
        module = _unwrapped(module)
        own = [numbers[id(each)] for each in module.parameters() if id(each) in numbers]
        if own:
            found[id(module)] = min(own), module
    inner = {
        id(each) for _, module in found.values() for each in module.modules() if each is not module
    }
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


def _whole(value: Tensor) -> Tensor:
    """Return a sharded tensor whole, which all ranks have to ask for; other tensors as they are."""
    if not isinstance(value, DTensor):
        return value
    return value.full_tensor() if dist.is_initialized() else value.to_local()
