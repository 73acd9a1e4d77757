"""What of a script only the garbage collector knows: the modules that it trains, and what it keeps between bodies."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from samebits.own_loop.optimizer import SCALER_FILE

Noted = list[tuple[weakref.ref[Tensor], int]]  # tensors with their versions


def trained_modules(optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the outermost modules with parameters of the optimizers, without what wraps them."""
    every = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    numbers = {id(each): number for number, each in enumerate(every)}
    found: dict[int, tuple[int, nn.Module]] = {}  # by identity, with the number of the first parameter
    for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:  # runs no code of others
        module = _unwrapped(module)
        if own := [numbers[id(each)] for each in module.parameters() if id(each) in numbers]:
            found[id(module)] = min(own), module
    inner = {id(each) for _, module in found.values() for each in list(module.modules())[1:]}
    # In the order of the optimizers, which is equal on all ranks.
    return [module for _, module in sorted(found.values(), key=lambda each: each[0]) if id(module) not in inner]


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what DistributedDataParallel, DataParallel or torch.compile have wrapped."""
    while isinstance(module, DistributedDataParallel | DataParallel) or hasattr(module, "_orig_mod"):
        module = getattr(module, "_orig_mod", None) or module.module  # type: ignore[assignment]
    return module


class AverageWatch:
    """Finds a moving average of the weights of `models` by hand, which would move once a micro-batch.

    Nothing marks such tensors. In the first body that is not its step's last one on this rank, the tensors of the
    process after the backward pass are compared with those at the body's end. Only the script makes tensors in between:
    if they have the shapes of all trained parameters, they are an average, or copies made for one.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._models, self._is_done = models, False
        self._before: Noted | None = None

    def begin(self) -> None:
        """Note the tensors after a backward pass."""
        if not self._is_done:
            self._before = note_tensors(self._models)

    def finds_average(self) -> bool:
        """Return at the end of a body whether the script averages weights by hand."""
        if self._before is None:
            return False
        changed = Counter(tuple(each.shape) for each in changed_tensors(self._models, self._before))
        self._before, self._is_done = None, True
        trained = [each for model in self._models for each in model.parameters() if each.requires_grad]
        return Counter(tuple(each.shape) for each in trained) <= changed


class CarryWatch(TorchFunctionMode):
    """Finds a tensor that a body hands on to the next one of its step, such as a hidden state or a bank of features.

    Compares two bodies of one step on this rank, after the first body of the script: what a module makes once, such as
    a table of positions, is made there. Tensors that the former has changed must not reach the loss of the latter.

    Args:
        refuse: Called for the operation that uses one.
    """

    def __init__(self, models: list[nn.Module], refuse: Callable[[], Any]) -> None:
        super().__init__()
        self._models, self._refuse = models, refuse
        self._before: Noted | None = None
        self._carried: list[Tensor] = []  # also what was computed from them; alive, so that ids are not used again
        self._ids: set[int] = set()
        self._num_bodies, self._is_entered = 0, False
        self._refuse_loss: Callable[[], Any] | None = None

    def begin(self, place: tuple[int, int] | None) -> None:
        """Start a body, by its place in the step."""
        self._num_bodies += 1
        if self._carried:
            self._enter()
        elif self._num_bodies > 1 and place is not None and place[0] < place[1] and self._before is None:
            self._before = note_tensors(self._models)

    def forbid(self, refuse: Callable[[], Any]) -> None:
        """Call `refuse` if the script computes anything with gradients before the backward pass of this body."""
        self._refuse_loss = refuse
        self._enter()

    def _enter(self) -> None:
        if not self._is_entered:
            self._is_entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop at the backward pass: torch has taken this mode off while it calls that one."""
        if self._is_entered:
            self._carried, self._ids, self._refuse_loss = [], set(), None

    def end(self) -> None:
        """End a body, before the next batch is read, or the loop."""
        if self._is_entered:
            self.stop()
            self._is_entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._before:
            self._carry(changed_tensors(self._models, self._before))
            self._before = []  # once

    def _carry(self, tensors: Sequence[Tensor]) -> None:
        self._carried += tensors
        self._ids |= set(map(id, tensors))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and follow the tensors."""
        result = func(*args, **(kwargs or {}))
        # GradScaler multiplies by a constant.
        if self._refuse_loss and sys._getframe(1).f_code.co_filename != SCALER_FILE and _has_grad(result):
            self._refuse_loss()
        if any(id(each) in self._ids for each in _tensors_in([args, kwargs])):
            self._carry(list(_tensors_in(result)))
            if _has_grad(result):
                self._refuse()
        return result


def _has_grad(value: Any) -> bool:
    return any(each.requires_grad for each in _tensors_in(value))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def note_tensors(models: list[nn.Module]) -> Noted:
    """Note the tensors of the process, but for those of the models and what was computed with gradients."""
    return [(weakref.ref(each), each._version) for each in _tensors(models)]


def changed_tensors(models: list[nn.Module], before: Noted) -> list[Tensor]:
    """Return those, of any shape, that were made or changed since they were noted."""
    # Only tensors that still live: ids are used again.
    versions = {id(tensor): version for ref, version in before if (tensor := ref()) is not None}
    return [each for each in _tensors(models) if versions.get(id(each)) != each._version]


def _tensors(models: list[nn.Module]) -> list[Tensor]:
    own = [each for model in models for each in (*model.parameters(), *model.buffers())]
    known = {id(each) for each in own} | {id(each.grad) for each in own}
    # Exactly these classes: asking other objects for theirs may run code of their own.
    every = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and id(each) not in known]
    # Those that have versions.
    return [each for each in every if each.layout == torch.strided and not each.is_inference() and each.grad_fn is None]
