"""Find a change of weights within a step that none of the loop's optimizers has made, and averages of them by hand."""

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samebits.data.order import MicroBatch
from samebits.errors import ConfigError, TrainError
from samebits.own_loop.guard import fault, variable_of

Noted = list[tuple[weakref.ref[Tensor], int, torch.Size]]  # tensors with their versions and shapes

# Weak, since the hook below stays for the life of the process.
_GUARDS: "weakref.WeakSet[WeightGuard]" = weakref.WeakSet()


class WeightGuard:
    """Compares the weights with those at the start of the step, in each micro-batch and before the optimizers act.

    A change in place raises a tensor's version. One through `.data` does not, so in the first step of each epoch the
    values are compared too.

    Attributes:
        optimizers: The loop's optimizers.
        micro_batch: The current one; None outside of the loop.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        has_owner: Callable[[nn.Parameter], bool],
    ) -> None:
        self._modules = modules
        self.optimizers = optimizers
        self._has_owner = has_owner
        self._named: list[tuple[str, Tensor]] = []
        self._versions: list[int] = []
        self._values: list[Tensor] = []
        self.micro_batch: MicroBatch | None = None
        _GUARDS.add(self)
        # Weak, so that the optimizer of a single body can be freed.
        self._others: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()

    def begin_step(self, *, with_values: bool) -> None:
        """Note the weights. `with_values`: keep a copy of them during this step."""
        self._named = [each for module in self._modules for each in module.named_parameters()]
        known = {parameter for _, parameter in self._named}
        more = (
            each
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        )
        self._named += [
            (f"a parameter of shape {tuple(each.shape)}", each)
            for each in more
            if each not in known
        ]
        self._versions = [tensor._version for _, tensor in self._named]
        self._values = [tensor.detach().clone() for _, tensor in self._named] if with_values else []

    def check(self, step: int) -> None:
        """Compare the weights. Raises TrainError if one has changed."""
        changed = self.with_other_versions() or [
            name
            for (name, tensor), value in zip(self._named, self._values, strict=bool(self._values))
            if not torch.equal(tensor, value)
        ]
        if changed:
            raise self._error(changed, step)

    def with_other_versions(self) -> list[str]:
        """Return the names of the parameters that something has written to since the start of the step."""
        pairs = zip(self._named, self._versions, strict=True)
        return [name for (name, tensor), version in pairs if tensor._version != version]

    def has_moved(self) -> bool:
        """Return whether a parameter has another value than at the start of the step; True if they were not kept."""
        pairs = zip(self._named, self._values, strict=bool(self._values))
        return not self._values or any(
            not torch.equal(tensor, value) for (_, tensor), value in pairs
        )

    def _error(self, changed: Sequence[str], step: int) -> TrainError:
        embeddings = (nn.Embedding, nn.EmbeddingBag)
        modules = [each for module in self._modules for each in module.modules()]
        if any(isinstance(each, embeddings) and each.max_norm is not None for each in modules):
            cause = "An embedding with max_norm changes its weights in each forward pass."
            fix = "Leave out max_norm, or normalize the vectors that it returns."
        elif not any(tensor.requires_grad for name, tensor in self._named if name in changed):
            cause = "They are not trained: the loop moves an average of weights itself, once a micro-batch."
            fix = (
                "Move it once a step, behind optimizer.step(), and not in forward:\n"
                "+    if loader.sync_gradients: ..."
            )
        else:
            cause = (
                "The loop changes weights itself: by clipping them, by a step by hand, or by perturbing and restoring "
                "them (SAM). Other micro-batches of this step have seen other weights."
            )
            fix = "Change them once a step, after optimizer.step(): if loader.sync_gradients: ..."
        return TrainError(
            f"weights changed within a step, and not by an optimizer of exact(): {changed[0]}",
            given=f"step {step:,}; {len(changed)} of {len(self._named)} parameters changed",
            cause=cause,
            fix=fix,
        )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check an optimizer that acts now, and that no exact loop has.

        One that lives in a single body, such as that of an attack on the inputs, is none of this loop's business.
        """
        if self.micro_batch is None:
            return
        own = {id(tensor) for _, tensor in self._named}
        trains = any(
            id(each) in own for group in optimizer.param_groups for each in group["params"]
        )
        if not trains and self._others.setdefault(optimizer, self.micro_batch) is self.micro_batch:
            return
        name = type(optimizer).__name__
        raise ConfigError(
            f"the loop calls step() of an optimizer ({name}) that exact() was not given",
            given="it trains parameters of the model"
            if trains
            else "it trains parameters outside of the model",
            cause="It would act in each micro-batch, whose number depends on the processes, on gradients of one rank.",
            fix="Give it with its module: exact([model, other], [optimizer, other_optimizer], ...). Instead of a new "
            "optimizer after a warm-up, change the settings in optimizer.param_groups.",
        )

    def drop_unowned(self, *, warns: bool) -> None:
        """Let parameters of the model that no optimizer has get no gradient in the loop.

        Theirs would be of one micro-batch on one rank, and clipping would count them. `warns`: report that to the user,
        once.
        """
        self._has_warned = not warns
        for module in self._modules:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and not self._has_owner(parameter):
                    parameter.register_post_accumulate_grad_hook(partial(self._drop, name))

    def _drop(self, name: str, given: Any) -> None:
        if self._has_owner(given):
            return
        given.grad = None
        if not self._has_warned:
            warnings.warn(
                f"{name} requires a gradient, and no optimizer has it: its gradient is dropped, so "
                "clipping does not count it. Set requires_grad_(False), or give it to an optimizer.",
                stacklevel=2,
            )
        self._has_warned = True


def _on_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    guards = list(_GUARDS)
    if any(optimizer is known for guard in guards for known in guard.optimizers):
        return  # of this loop or of another exact one
    for guard in guards:
        guard.check_optimizer(optimizer)


# For every optimizer of the process: those that `exact` was not given have no hook of ours.
register_optimizer_step_pre_hook(_on_step)


def hold_average(
    models: Sequence[nn.Module],
    is_trained: Callable[[nn.Parameter], bool],
    shapes: Iterable[torch.Size],
) -> bool:
    """Return whether tensors have the shapes of all trained parameters of a model.

    Of several models, one with a single parameter does not count: other tensors may have its shape.
    """
    given = Counter(shapes)
    own = [
        Counter(each.shape for each in model.parameters() if is_trained(each)) for model in models
    ]
    least = 2 if len(own) > 1 else 1
    return any(each.total() >= least and each <= given for each in own)


class OutsideNorms:
    """Finds batch norm in training mode in modules that `exact` was not given, such as a teacher.

    No repetition shows it: a forward pass in training mode changes the running statistics, and does not read them. They
    are compared at the end of each backward pass, so an average that copies buffers after the update is none.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._norms: list[weakref.ref[_BatchNorm]] | None = None
        self._before: list[tuple[_BatchNorm, tuple[int, int]]] = []

    def begin(self, *, looks: bool) -> None:
        """Begin a micro-batch. `looks`: look for new ones in the process, which takes some 50 ms."""
        if looks or self._norms is None:
            own = set(nn.ModuleList(self._modules).modules())
            self._norms = [
                weakref.ref(each)
                for each in gc.get_objects()
                # not isinstance(): see `_tensors`
                if issubclass(type(each), _BatchNorm) and each not in own
            ]
        self._before = [
            (norm, _versions(norm)) for ref in self._norms if (norm := ref()) is not None
        ]

    def check(self, step: int) -> None:
        """Compare them after a backward pass. Raises TrainError if a forward pass has changed one."""
        for norm, (count, weight) in self._before:
            now, weight_now = _versions(norm)
            # One whose weight has changed too was moved as a whole, as by load_state_dict().
            if now != count and weight_now == weight:
                raise fault("outside", step=step, name=variable_of(norm))


def _versions(norm: _BatchNorm) -> tuple[int, int]:
    """Return the versions of the number of batches that a batch norm has seen, and of its weight."""
    every = [getattr(norm, name, None) for name in ("num_batches_tracked", "weight")]
    count, weight = [-1 if each is None or each.is_inference() else each._version for each in every]
    return count, weight


class AverageWatch:
    """Finds a moving average of the weights of `models` by hand, which would move once a micro-batch.

    Nothing marks such tensors. In each body that is not its step's last one on this rank, those that have the shapes of
    trained parameters are compared after the backward pass and at the body's end. Only the script changes tensors in
    between: if they have the shapes of all trained parameters of a model, they are an average, or copies made for one.
    """

    def __init__(
        self, models: Sequence[nn.Module], is_trained: Callable[[nn.Parameter], bool]
    ) -> None:
        self._models = models
        self._is_trained = is_trained
        self._known: list[weakref.ref[Tensor]] | None = None
        self._before: Noted | None = None
        self._is_first = False
        self._num_passes = 0

    def end_pass(self) -> None:
        """End a pass over the data, also in the middle of a body; after some, look for new tensors, which is slow."""
        self._num_passes += 1
        if not self._num_passes & (self._num_passes - 1):
            self._known = None
        if (
            self._before is not None and follow_data is not None
        ):  # None: Python ends, in the middle of a body
            self._before = None
            follow_data(is_on=False)

    def begin(self) -> None:
        """Note the tensors after a backward pass, which may be the second one of the body."""
        self._is_first = self._known is None or (self._is_first and self._before is not None)
        if self._known is None or self._is_first:
            # Not by requires_grad, which GANs set for each part of a body.
            shapes = {
                each.shape
                for model in self._models
                for each in model.parameters()
                if self._is_trained(each)
            }
            self._before = [
                (weakref.ref(each), each._version, each.shape) for each in _tensors(self._models)
            ]
            self._known = [ref for ref, _, shape in self._before if shape in shapes]
        else:
            self._before = [
                (ref, each._version, each.shape)
                for ref in self._known
                if (each := ref()) is not None
            ]
        follow_data(is_on=True)

    def check(self, step: int) -> None:
        """Compare the tensors, at the end of a body. Raises TrainError if the loop averages weights by hand."""
        if self._before is None:
            return
        follow_data(is_on=False)
        # One that it makes each time has replaced one that is known.
        changed = [
            shape
            for ref, version, shape in self._before
            if (each := ref()) is None or each._version != version
        ]
        if self._is_first:
            # Made or changed since; only tensors that still live: ids are used again.
            versions = {id(ref()): version for ref, version, _ in self._before}
            changed = [
                each.shape
                for each in _tensors(self._models)
                if versions.get(id(each)) != each._version
            ]
        self._before = None
        if changed and hold_average(self._models, self._is_trained, changed):
            raise TrainError(
                "weights are averaged or copied by hand in the training loop",
                given=f"step {step:,}, counted from 0",
                cause="The average would move, or the copy be taken, in each micro-batch, whose number depends on the "
                "processes.",
                fix="Do it once a step: if loader.sync_gradients: ... Or use torch's average, given to "
                "exact(per_step=[average]) in a script that calls exact():\n"
                "+average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))\n"
                "+    average.update_parameters(model)  # in the loop, after optimizer.step()",
            )


def follow_data(*, is_on: bool) -> None:
    """Let a change through `tensor.data` raise the tensor's version, which shows a change."""
    if is_on:
        torch.Tensor.data = property(Tensor.detach, _set_data)  # type: ignore[assignment]
    elif "data" in vars(torch.Tensor):
        del torch.Tensor.data  # the one of its base is back


def _set_data(tensor: Tensor, value: Tensor) -> None:
    # not as module.cpu() on a CPU
    is_moved = value.device == tensor.device and value.data_ptr() != tensor.data_ptr()
    torch._C.TensorBase.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if is_moved:
        torch.autograd.graph.increment_version(tensor)


def _tensors(models: Sequence[nn.Module]) -> list[Tensor]:
    own = [each for model in models for each in (*model.parameters(), *model.buffers())]
    known = {id(each) for each in own} | {id(each.grad) for each in own}
    # Exactly these classes: asking other objects for theirs may run code of their own.
    every = [
        each
        for each in gc.get_objects()
        if type(each) in (Tensor, nn.Parameter) and id(each) not in known
    ]
    # Those that have versions. What state_dict() or detach() gives is the same memory, and no average of it.
    places = {each.data_ptr() for each in own}
    return [
        each
        for each in every
        if each.layout == torch.strided
        and not each.is_inference()
        and each.grad_fn is None
        and each.data_ptr() not in places
    ]
