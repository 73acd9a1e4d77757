"""An optimizer that acts once a step, and the objects of a loop that follow it: schedulers, averages, scalers.

Objects keep their identity and get a subclass of their own class, so `isinstance`, `state_dict` and references that
others hold still work.
"""

import copyreg
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.errors import ConfigError
from samebits.own_loop.session import ExactLoop
from samebits.portable.scripts import own_kernels, portable_step

# What a script can contain that cannot be exact, refused by name before the first step.


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Check that modules can be trained exactly."""
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
                f"the model is a {type(module).__name__}",
                allowed="torch.nn.Module",
                fix="Give a module.",
            )
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
                raise ConfigError(
                    f"layer {name or type(module).__name__} has sparse gradients",
                    cause="Gradients are summed as dense tensors, in an order that depends on no rank.",
                    fix="Set sparse=False, with an optimizer for dense gradients instead of SparseAdam.",
                )
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
        raise ConfigError(
            "no parameter of the model requires a gradient",
            fix="Unfreeze some: requires_grad_(True).",
        )


def check_split(order: Order, world: World) -> None:
    """Check that a step has work for more than one rank.

    Raises:
        ConfigError: It is a single micro-batch, which all other ranks would only repeat.
    """
    if world.size > 1 and order.micro_batch >= min(order.global_batch, order.num_samples):
        raise ConfigError(
            f"a step is one micro-batch, so {world.size - 1} of {world.size} ranks would only repeat it",
            given=f"global_batch={order.global_batch}, micro_batch={order.micro_batch}, {order.num_samples} samples",
            cause="The script divides its batch size by the number of processes, or micro_batch is too large.",
            fix="Give the same global_batch at any number of processes, and a smaller micro_batch.",
        )


def check_schedule(follower: object, num_batches: int, steps_per_epoch: int) -> None:
    """Check that a scheduler that acts once a step was not made from the length of the DataLoader.

    Args:
        num_batches: Length of the DataLoader that `exact` was given.
    """
    if not isinstance(follower, LRScheduler) or num_batches == steps_per_epoch:
        return
    for each in (follower, *getattr(follower, "_schedulers", ())):
        for name in ("total_steps", "T_max", "total_iters", "T_0"):
            value = getattr(each, name, None)
            if isinstance(value, int) and value > 1:
                raise ConfigError(
                    f"{type(each).__name__} has a length and was made before exact(): {name}={value:,}",
                    given=f"the DataLoader has {num_batches:,} batches, and an epoch {steps_per_epoch:,} steps",
                    cause="It acts once a step, and the number of batches depends on the number of processes.",
                    fix="Make it after exact(), from len(loader), and give it to loader.per_step(scheduler).",
                )


def check_caller(frame: FrameType | None) -> None:
    """Check that a model is not called by a wrapper that was made after `exact`."""
    if frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        raise ConfigError(
            "the model of exact() is wrapped by DistributedDataParallel or DataParallel",
            cause="It sums gradients over ranks, in an order that depends on their number; exact() sums them already.",
            fix="Use the model that exact() returned, without a wrapper.",
        )


_WRAPPERS = ("torch/nn/parallel/distributed.py", "torch/nn/parallel/data_parallel.py")


def one_sample(error: ValueError) -> ConfigError | None:
    """Return the error for a micro-batch of one sample under batch norm, which torch refuses; None for other errors."""
    if "more than 1 value per channel" not in str(error):
        return None
    return ConfigError(
        "batch norm has a micro-batch of one sample, and no variance to divide by",
        given=str(error),
        cause="The last micro-batch of an epoch has what the batch sizes leave over.",
        fix="Set drop_last=True in the DataLoader, or another micro_batch, so that none has one sample.",
    )


# The methods that act once a step, by class.
ONCE: tuple[tuple[type, tuple[str, ...]], ...] = (
    (LRScheduler, ("step",)),
    (AveragedModel, ("update_parameters",)),
)
SCALER_FILE = inspect.getfile(torch.amp.GradScaler)


def plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the optimizer's own `step`, which `attach` replaces.

    Raises:
        ConfigError: The optimizer evaluates the loss several times a step, or has no portable form.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times a step, each time of the whole global batch",
            fix="Use an optimizer whose step() needs no closure.",
        )
    if own_kernels() == "portable":
        return portable_step(optimizer)
    # The class's own method: the instance may have a scheduler's wrapper.
    method = type(optimizer).step
    return lambda: method(optimizer)  # closures are called before


def attach(optimizer: Optimizer, loop: ExactLoop, number: int) -> None:
    """Let an optimizer act once a step of a loop."""
    base = type(optimizer)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        # A closure computes the loss, also in micro-batches in which the optimizer does not act.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # type: ignore[attr-defined]  # schedulers warn if it is missing
        if loop.is_inside:
            if loop.check_finite:
                _check_caller()
            loop.on_step(number)
        else:
            base.step(self)
        return loss

    # Otherwise load_state_dict() wraps it with the optimizer's hooks, which `base.step` calls already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        loop.on_zero_grad(number)
        base.zero_grad(self, set_to_none)

    # A scheduler that exists already has put a function of its own onto the optimizer.
    is_scheduled = optimizer.__dict__.pop("step", None) is not None
    # A script may compile its whole step.
    _subclass(
        optimizer,
        {"step": torch.compiler.disable(step), "zero_grad": torch.compiler.disable(zero_grad)},
    )
    if is_scheduled:
        bound = optimizer.step

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            return bound(*args, **kwargs)

        scheduled._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler warns without this mark of its own
        optimizer.step = scheduled  # type: ignore[method-assign]


def follow(follower: Any, loop: ExactLoop) -> None:
    """Let an object act once a step of a loop: a scheduler, an `AveragedModel`, a `GradScaler` or one like them.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(follower, torch.amp.GradScaler):
        _follow_scaler(follower, loop)
        return
    names = next((names for kind, names in ONCE if isinstance(follower, kind)), None)
    if names is None:
        names = tuple(
            name for name in ("step", "update") if callable(getattr(follower, name, None))
        )
    if not names:
        raise ConfigError(
            f"per_step has a {type(follower).__name__}",
            allowed="learning rate schedulers, AveragedModel, GradScaler, or an object with step() or update()",
            fix="Remove it, or call it yourself: if loader.sync_gradients: ...",
        )
    base = type(follower)

    def once(method: Callable[..., Any]) -> Callable[..., Any]:
        def act(self: Any, *args: Any, **kwargs: Any) -> Any:
            return loop.after_update(
                lambda: method(self, *args, **kwargs), base.__name__, method.__name__
            )

        return act

    members = {name: once(getattr(base, name)) for name in names}
    _subclass(follower, members)
    loop.note_follower(follower)


def _check_caller() -> None:
    """Refuse a GradScaler that is not in `per_step`: it would adapt its scale after each micro-batch."""
    # Frame 2 is the caller of the replaced `step`.
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):  # wrappers of a scheduler and of torch.compiler.disable may be between them
        if frame is not None and frame.f_code.co_filename == SCALER_FILE:
            if not frame.f_locals["self"].is_enabled():  # it then only passes the call on
                return
            raise ConfigError(
                "a GradScaler is not in per_step",
                cause="It would adapt its scale after each micro-batch, whose number depends on the ranks.",
                fix="Call exact(..., per_step=[scaler]).",
            )
        frame = frame.f_back if frame is not None else None


def _follow_scaler(scaler: torch.amp.GradScaler, loop: ExactLoop) -> None:
    base = type(scaler)
    loop.check_finite = False

    def is_waiting() -> bool:
        return loop.is_inside and not loop.is_last

    def unscale(self: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        if not is_waiting():
            base.unscale_(self, optimizer)

    def step(self: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_waiting():
            optimizer.step(*args, **kwargs)
            return None
        result = base.step(self, optimizer, *args, **kwargs)
        if loop.is_inside:
            loop.on_skipped_step(optimizer)  # it does not call step() after an overflow
        return result

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        if not is_waiting():
            base.update(self, new_scale)

    _subclass(scaler, {"unscale_": unscale, "step": step, "update": update})


def attach_module(module: nn.Module, loop: ExactLoop) -> None:
    """Let a module's `zero_grad` do in a loop what the optimizer's does, and its calls count as progress."""
    base = type(module)

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        loop.on_module_zero_grad(self)
        base.zero_grad(self, set_to_none)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_caller(sys._getframe(1))
            loop.on_forward(self)  # a long validation in the body is no hang
        try:
            return base.__call__(self, *args, **kwargs)
        except ValueError as error:
            named = one_sample(error) if loop.is_inside else None
            if named is None:
                raise
            raise named from error

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not loop.is_inside:
            loop.habits.raise_fault()  # before a script saves what an iteration that ended inside a step has left
        return base.state_dict(self, *args, **kwargs)

    _subclass(module, {"zero_grad": zero_grad, "__call__": call, "state_dict": state_dict})


def _subclass(instance: Any, members: dict[str, Any]) -> None:
    base: Any = type(instance)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        result = base.__reduce_ex__(self, protocol)
        if result[:2] == (copyreg.__newobj__, (type(self),)):  # type: ignore[attr-defined]  # not in its types
            # A copy has the script's class: it belongs to no loop, and can be unpickled without Samebits.
            return copyreg._reconstructor, (base, object, None), *result[2:]  # type: ignore[attr-defined]
        return result

    for name in members:
        # The instance's own attribute would come before the method of the new class.
        instance.__dict__.pop(name, None)
    # A copy or a pickle has the class of before.
    instance.__class__ = type(base.__name__, (base,), {**members, "__reduce_ex__": reduce_ex})
