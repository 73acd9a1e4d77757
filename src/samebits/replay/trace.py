"""A traced step: digests of all that it computes, in the order of execution, and comparisons of tensors by their
bits.
"""

import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from samebits.bits import Element, digest, first_element, number_text, tensors_in
from samebits.data.order import MicroBatch
from samebits.data.samples import Batch, sample_digests
from samebits.provenance.record import StepRecord
from samebits.replay.stepper import ReplayedRun

# Comparison of tensors by their bits.


MODEL = "(the model)"
_STANDS_OUT = 4.0  # times as much as any other module


def module_of(tensor: str) -> str:
    """Return the name of the module that a parameter or buffer belongs to."""
    return tensor.rpartition(".")[0] or MODEL


def first_tensor(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[str, Element] | None:
    """Return the first of the tensors, of any shape, that differs, and its first element that does.

    Names may differ, if the order is the same.
    """
    names = list(zip(a, b, strict=False))
    if len(a) != len(b) or any(a[one].shape != b[other].shape for one, other in names):
        names = [(name, name) for name in a if name in b]
    for one, other in names:
        found = first_element([a[one]], [b[other]])
        if found is not None:
            return one, found
    name = next(
        (name for name in [*a, *b] if len(a) != len(b) and (name not in a or name not in b)), None
    )
    if name is None:
        return None
    kinds = ["present" if name in each else "none" for each in (a, b)]
    return name, Element("", kinds[0], kinds[1], is_value=False)


def largest_difference(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor]
) -> tuple[str, Element] | None:
    """Return the tensor that differs most, relative to its largest value, and the element that differs most.

    Both have the same names, and tensors of the same shapes.

    None if another module differs almost as much, so that no single tensor stands out.
    """
    scores: dict[str, tuple[float, int]] = {}
    for name in a:
        if (
            ":" in name
            or name not in b
            or a[name].shape != b[name].shape
            or not a[name].is_floating_point()
        ):
            continue
        one = a[name].detach().cpu().double().reshape(-1)
        other = b[name].detach().cpu().double().reshape(-1)
        # A NaN counts as the largest difference. As NaN it would never compare as larger.
        distance = torch.nan_to_num((one - other).abs(), nan=float("inf"))
        # A tensor of zeros has no scale to divide by.
        scores[name] = (
            float(distance.max() / other.abs().max().clamp_min(1e-12)),
            int(distance.argmax()),
        )
    if not scores:
        return None
    name = max(scores, key=lambda each: scores[each][0])
    score, at = scores[name]
    rest = [other for each, (other, _) in scores.items() if module_of(each) != module_of(name)]
    if score <= _STANDS_OUT * max(rest, default=0.0):
        return None
    index = (
        tuple(int(axis) for axis in np.unravel_index(at, a[name].shape)) if a[name].dim() else ()
    )
    return name, Element(f"{list(index)}", number_text(a[name][index]), number_text(b[name][index]))


# What a traced step computed: digests, and a few tensors. `tracer.py` collects it.


FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
OPERATION = "operation"
CALL = "call"
GRADIENT = "gradient"
BATCH = "batch"
SUMMED = "summed"
APPLIED = "applied"
# (kind, micro-batch, number or name): an operation, a call, a gradient, the loss or the batch itself.
Key = tuple[str, int, int | str]


@dataclass
class Call:
    """One call of a module."""

    name: str  #: The module's name in the model; empty for the model itself.
    kind: str  #: Its class.
    parent: int | None  #: Number of the call that contains this one; None for the model.
    inputs: bytes  #: Digest of the tensors it was called with.
    output: bytes = b""  #: Digest of the tensors it returned.
    order: int = -1  #: Rank in the order in which calls returned.


@dataclass(frozen=True)
class Operation:
    """One operation of torch."""

    phase: str  #: FORWARD, LOSS or BACKWARD.
    name: str  #: Its name, such as aten.convolution.
    node: str  #: In the backward pass, the autograd function that ran it.
    call: int | None  #: Number of the call that it belongs to; None outside of the model.
    output: bytes  #: Digest of its results.

    @property
    def title(self) -> str:
        """The name, with the autograd function if there is one."""
        return f"{self.name} in {self.node}" if self.node else self.name


@dataclass
class MicroTrace:
    """The trace of a micro-batch."""

    indices: list[int]  #: Samples, in order.
    samples: dict[int, str] = field(default_factory=dict)  #: Digest of each sample's values.
    #: Calls of modules, in the order in which they began.
    calls: list[Call] = field(default_factory=list)
    #: Operations, in the order in which they ran.
    operations: list[Operation] = field(default_factory=list)
    loss: bytes = b""  #: Digest of the loss's terms.
    #: Digest of the gradient of each parameter, by name.
    gradients: dict[str, bytes] = field(default_factory=dict)


@dataclass
class StepTrace:
    """The trace of a step."""

    record: StepRecord  #: The step's record.
    micro_batches: list[MicroTrace] = field(default_factory=list)  #: The micro-batches, in order.
    #: Digest of each summed gradient, by parameter.
    summed: dict[str, bytes] = field(default_factory=dict)
    #: Digest of each gradient that the optimizer received, by parameter.
    applied: dict[str, bytes] = field(default_factory=dict)
    kept: dict[Key, list[Tensor]] = field(default_factory=dict)  #: The tensors of the wanted keys.


# A traced step: digests of everything that it computes, in the order of execution.
#
# The step itself runs as in training, between hooks:
#
#     loader.batch             digest of each sample
#     modules, forward         digests of inputs and output of each call, with the calls inside of it
#     operations               name and digest of each result: TorchDispatchMode, below autograd, so backward as well.
#                              A node of the backward graph belongs to the module whose forward made it
#     parameters, backward     digest of the gradient of the micro-batch
#     reducer.reduce           digest of each summed gradient
#     optimizer, before        digest of each gradient after clipping
#
# A digest takes 16 bytes, so a trace is small. Tensors are kept only for a few keys that are known from a first pass:
# the step is then repeated, and gives the same bits.


_OWNER = "samebits module"  # key in the metadata of a backward node
_UNSET = ("aten.empty", "aten.new_empty")  # their values are whatever was in memory


def trace_step(side: ReplayedRun, keep: Container[Key] = ()) -> StepTrace:
    """Run the next step of a run, and trace it; keep the tensors with these keys."""
    side.num_replays += 1
    tracer = _Tracer(side, keep)
    job = side.job
    loader = side.loader
    reducer = job.reducer
    with tracer.hooks():
        job.reducer, side.loader = _TracedReducer(reducer, tracer), _TracedLoader(loader, tracer)  # type: ignore[assignment]
        try:
            record = side.step()
        finally:
            job.reducer = reducer
            side.loader = loader
    traces = [tracer.traces[index] for index in sorted(tracer.traces)]
    return StepTrace(record, traces, tracer.summed, tracer.applied, tracer.kept)


class _Current(threading.local):
    """The micro-batch of this thread: with synchronized batch norm, each one has its own thread."""

    index: int | None = None


class _Tracer:
    """Collects the trace of one step."""

    def __init__(self, side: ReplayedRun, keep: Container[Key]) -> None:
        self.job = side.job
        self._keep = keep
        self._names = {parameter: name for name, parameter in self.job.model.named_parameters()}
        self._local = _Current()
        self._last = 0
        self._open: dict[int, list[int]] = {}  # numbers of the calls that run, by micro-batch
        self._returned: dict[int, int] = {}
        self.phase: dict[int, str] = {}
        self.traces: dict[int, MicroTrace] = {}
        self.summed: dict[str, bytes] = {}
        self.applied: dict[str, bytes] = {}
        self.kept: dict[Key, list[Tensor]] = {}

    @property
    def index(self) -> int:
        """The current micro-batch. A GPU's backward pass runs in a thread of its own, for the latest one."""
        return self._last if self._local.index is None else self._local.index

    @property
    def can_hook(self) -> bool:
        """Whether modules and operations can be traced. Hooks would change what torch.compile generates."""
        return self.job.compiled is None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Register the hooks for one step."""
        with ExitStack() as stack:
            for parameter, name in self._names.items():
                # torch refuses a hook on a frozen parameter.
                if parameter.requires_grad:
                    stack.callback(parameter.register_hook(self._gradient(name)).remove)
            stack.callback(
                self.job.optimizer.register_step_pre_hook(lambda *_: self.take(APPLIED)).remove
            )
            for name, module in self.job.model.named_modules() if self.can_hook else ():
                before = module.register_forward_pre_hook(
                    self._enter(name), with_kwargs=True, prepend=True
                )
                after = module.register_forward_hook(self._leave, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Trace a micro-batch."""
        index = self._local.index = self._last = micro_batch.index
        self._open[index] = []
        self._returned[index] = 0
        self.phase[index] = FORWARD
        # `batch` has made it already, unless the loader was not traced.
        self.traces.setdefault(index, MicroTrace(micro_batch.indices.tolist()))
        try:
            with _Operations(self, index) if self.can_hook else ExitStack():
                yield
        finally:
            self._local.index = None

    def batch(self, batch: Batch) -> None:
        """Record the samples of the next micro-batch: it is read before the micro-batch begins."""
        index = len(self.traces)
        trace = self.traces[index] = MicroTrace(batch.indices.tolist())
        trace.samples = sample_digests(batch)
        self.keep_if_wanted((BATCH, index, 0), tensors_in((batch.inputs, batch.targets)))

    def operation(self, index: int, name: str, result: Any) -> None:
        """Record an operation."""
        tensors = tensors_in(result)
        phase = self.phase[index]
        node = ""
        if not tensors or name.startswith(_UNSET):
            return
        call = self._open[index][-1] if self._open[index] else None
        if phase == BACKWARD:
            # The only way to learn which operation of the backward pass has computed this.
            current: Any = torch._C._current_autograd_node()
            if current is None:
                return  # sums around the backward pass
            node = current.name().rpartition("::")[2]
            call = current.metadata.get(_OWNER)
        operations = self.traces[index].operations
        self.keep_if_wanted((OPERATION, index, len(operations)), tensors)
        operations.append(Operation(phase, name, node, call, digest(tensors)))

    def keep_if_wanted(self, key: Key, tensors: list[Tensor]) -> None:
        """Keep a copy of tensors if they are wanted."""
        if key in self._keep:
            # clone: for a tensor on the CPU, cpu() makes no copy, and later operations change it in place.
            self.kept[key] = [tensor.detach().cpu().clone() for tensor in tensors]

    def take(self, kind: str) -> None:
        """Record the gradient of each parameter, SUMMED or APPLIED."""
        found = self.summed if kind == SUMMED else self.applied
        for parameter, name in self._names.items():
            if parameter.grad is not None:
                found[name] = digest([parameter.grad])
                self.keep_if_wanted((kind, 0, name), [parameter.grad])

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            index = self.index
            if index in self.traces:
                # What the tracer itself computes must not be traced.
                with _disable_current_modes():
                    self.traces[index].gradients[name] = digest([gradient])
                    self.keep_if_wanted((GRADIENT, index, name), [gradient])

        return hook

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            index = self.index
            if self.phase.get(index) != FORWARD:
                return  # recomputed activations
            opened = self._open[index]
            calls = self.traces[index].calls
            with _disable_current_modes():
                inputs = digest(tensors_in((args, kwargs)))
            calls.append(Call(name, type(module).__name__, opened[-1] if opened else None, inputs))
            opened.append(len(calls) - 1)

        return hook

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        index = self.index
        if self.phase.get(index) != FORWARD:
            return
        number = self._open[index].pop()
        call = self.traces[index].calls[number]
        tensors = tensors_in(output)
        call.order = self._returned[index]
        self._returned[index] += 1
        with _disable_current_modes():
            call.output = digest(tensors)
            self.keep_if_wanted((CALL, index, number), tensors)
        _own(number, tensors, tensors_in((args, kwargs)))
        if not self._open[index]:
            self.phase[index] = LOSS


def _own(call: int, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Note for each node of the backward graph that this call has added that it belongs to this call."""
    before = {tensor.grad_fn for tensor in inputs}
    stack = [tensor.grad_fn for tensor in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in before:
            continue
        metadata: Any = node.metadata  # a property in C++, a method in torch's types
        if _OWNER in metadata:
            continue
        metadata[_OWNER] = call
        stack += [following for following, _ in node.next_functions]


class _Operations(TorchDispatchMode):
    """Traces the operations of a micro-batch. Inside of `__torch_dispatch__`, torch switches the mode off."""

    def __init__(self, tracer: _Tracer, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer
        self._index = index

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tracer.operation(self._index, str(func).rpartition(".")[0], result)
        return result


class _Traced:
    """An object that shows what it does to the tracer; what it does not define is the object's own."""

    def __init__(self, own: Any, tracer: _Tracer) -> None:
        # Past __setattr__, which a subclass has.
        vars(self).update(_own=own, _tracer=tracer)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_own"], name)


class _TracedReducer(_Traced):
    """A reducer between hooks."""

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """See `Reducer.micro_batch`."""
        with self._own.micro_batch(micro_batch), self._tracer.micro_batch(micro_batch):
            yield

    def backward(self, loss: Tensor, extras: Tensor | None = None) -> None:
        """See `Reducer.backward`."""
        tracer = self._tracer
        index = tracer.index
        with _disable_current_modes():
            values = tensors_in((loss, extras))
            tracer.traces[index].loss = digest(values)
            tracer.keep_if_wanted((LOSS, index, 0), values)
        tracer.phase[index] = BACKWARD
        self._own.backward(loss, extras)

    def reduce(self, flag: float = 0.0) -> None:
        """See `Reducer.reduce`."""
        self._own.reduce(flag)
        self._tracer.take(SUMMED)


class _TracedLoader(_Traced):
    """A loader that shows its batches to the tracer."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Such as `digests`: meant for the loader itself, which reads them.
        setattr(self._own, name, value)

    def batch(self, *request: Any, **how: Any) -> Batch:
        """See `Loader.batch`."""
        batch: Batch = self._own.batch(*request, **how)
        self._tracer.batch(batch)
        return batch
