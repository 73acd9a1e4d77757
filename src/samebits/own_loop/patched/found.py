"""What of a script only the garbage collector knows: the modules that it trains, and averages of their weights."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

_MOVES = ("update", "update_parameters", "step")

Noted = list[tuple[weakref.ref[Tensor], int, torch.Size]]  # tensors with their versions and shapes


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
            if _shapes(models) <= Counter(tensor.shape for tensor in kept):
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


def _shapes(models: Sequence[nn.Module]) -> Counter[torch.Size]:
    return Counter(each.shape for model in models for each in model.parameters() if each.requires_grad)


class AverageWatch:
    """Finds a moving average of the weights of `models` by hand, which would move once a micro-batch.

    Nothing marks such tensors. In each body that is not its step's last one on this rank, those that have the shapes of
    trained parameters are compared after the backward pass and at the body's end. Only the script changes tensors in
    between: if they have the shapes of all trained parameters, they are an average, or copies made for one.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._known: list[weakref.ref[Tensor]] | None = None
        self._before: Noted | None = None
        self._is_first = False

    def begin_pass(self) -> None:
        """Look for new tensors, which takes a while, in the next body."""
        self._known = None

    def begin(self) -> None:
        """Note the tensors after a backward pass."""
        self._is_first = self._known is None
        if self._known is None:
            shapes = set(_shapes(self._models))
            self._before = [(weakref.ref(each), each._version, each.shape) for each in _tensors(self._models)]
            self._known = [ref for ref, _, shape in self._before if shape in shapes]
        else:
            self._before = [(ref, each._version, each.shape) for ref in self._known if (each := ref()) is not None]
        follow_data(is_on=True)

    def finds_average(self) -> bool:
        """Return at the end of a body whether the script averages weights by hand."""
        if self._before is None:
            return False
        follow_data(is_on=False)
        # One that it makes each time has replaced one that is known.
        changed = [shape for ref, version, shape in self._before if (each := ref()) is None or each._version != version]
        if self._is_first:
            changed = [each.shape for each in changed_tensors(self._models, self._before)]
        self._before = None
        return _shapes(self._models) <= Counter(changed)


def follow_data(*, is_on: bool) -> None:
    """Let a change through `tensor.data` raise the tensor's version, which shows a change."""
    if is_on:
        torch.Tensor.data = property(Tensor.detach, _set_data)  # type: ignore[assignment]
    elif "data" in vars(torch.Tensor):
        del torch.Tensor.data  # the one of its base is back


def _set_data(tensor: Tensor, value: Tensor) -> None:
    is_moved = value.device == tensor.device and value.data_ptr() != tensor.data_ptr()  # not as module.cpu() on a CPU
    torch._C.TensorBase.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if is_moved:
        torch.autograd.graph.increment_version(tensor)


def changed_tensors(models: list[nn.Module], before: Noted) -> list[Tensor]:
    """Return those, of any shape, that were made or changed since they were noted."""
    # Only tensors that still live: ids are used again.
    versions = {id(tensor): version for ref, version, _ in before if (tensor := ref()) is not None}
    return [each for each in _tensors(models) if versions.get(id(each)) != each._version]


def _tensors(models: list[nn.Module]) -> list[Tensor]:
    own = [each for model in models for each in (*model.parameters(), *model.buffers())]
    known = {id(each) for each in own} | {id(each.grad) for each in own}
    # Exactly these classes: asking other objects for theirs may run code of their own.
    every = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and id(each) not in known]
    # Those that have versions.
    return [each for each in every if each.layout == torch.strided and not each.is_inference() and each.grad_fn is None]
