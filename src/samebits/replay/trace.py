"""What a step computes, as digests: one recorder for a recipe's job and for the own loop of a script.

    start            a micro-batch, with its samples
      hooks          inputs and outputs of each call of a module; operations, below autograd, so backward as well
    loss             its terms
      hooks          gradient of each parameter
    step             gradients, buffers, weights and optimizer state after the update

A digest has 16 characters, so a trace is small. Tensors are kept only for a few keys that are known from a first pass:
the step is then repeated, and gives the same bits.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from samebits.bits import as_bytes, plain_in, tensors_in
from samebits.data.order import MicroBatch
from samebits.data.samples import Batch, sample_digests
from samebits.parallel.checksum import checksums

if TYPE_CHECKING:
    from samebits.engine.job import Job

FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"
OPERATION, CALL, GRADIENT, BATCH, SUMMED, APPLIED = (
    "operation", "call", "gradient", "batch", "summed", "applied",
)  # fmt: skip
# (kind, micro-batch, number or name): an operation, a call, a gradient, the loss or the batch itself.
Key = tuple[str, int, int | str]
Digests = dict[str, str]  # by name
# How much is recorded: the state after each step; also calls of modules; also the operations of the first forward pass;
# or the operations of all, and the gradients of each micro-batch.
STATE, CALLS, OPERATIONS, EVERYTHING = range(4)


def digest(value: Any) -> str:
    """Return a digest of all tensors and plain values in a value, 16 hex digits."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors_in(value):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        if dense.device.type == "cpu":
            found.update(as_bytes(dense).numpy().data)
        else:  # computed there, since a transfer of all activations would take longer than the step
            found.update(repr(checksums({"": dense})).encode())
    found.update(repr(list(plain_in(value))).encode())
    return found.hexdigest()


def digests(values: Mapping[str, Any]) -> Digests:
    """Return a digest of each value, such as tensors of any shape, by name."""
    return {name: digest(value) for name, value in values.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of each parameter that has one, of any shape, by name."""
    every = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: gradient for name, gradient in every if gradient is not None}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> Digests:
    """Return digests of the optimizer's tensors, named after their parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return digests(
        {
            f"{key} of {names.get(id(parameter), 'a parameter')}": value
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
    )


@dataclass
class Call:
    """One call of a module."""

    name: str  #: The module's name in the model; empty for the model itself.
    kind: str  #: Its class.
    parent: int | None  #: Number of the call that contains this one; None for the outermost ones.
    inputs: str  #: Digest of what it was called with.
    output: str = ""  #: Digest of what it returned.


def events(calls: Sequence[Call]) -> Iterator[tuple[int, bool]]:
    """Yield the number of each call where it begins and where it returns, and whether it returns, in order of time."""
    opened: list[int] = []
    for number, call in enumerate(calls):
        while opened and opened[-1] != call.parent:
            yield opened.pop(), True
        yield number, False
        opened.append(number)
    while opened:
        yield opened.pop(), True


def returned(calls: Sequence[Call]) -> list[tuple[int, Call]]:
    """Return the calls with their numbers, in the order in which they return."""
    return [(number, calls[number]) for number, is_end in events(calls) if is_end]


@dataclass
class Operation:
    """One operation of torch."""

    phase: str  #: FORWARD, LOSS or BACKWARD.
    name: str  #: Its name, such as aten.convolution.
    node: str  #: In the backward pass, the autograd function that ran it.
    call: int | None  #: Number of the call that it belongs to; None outside of the model.
    output: str  #: Digest of its results.

    @property
    def title(self) -> str:
        """The name, with the autograd function if there is one."""
        return f"{self.name} in {self.node}" if self.node else self.name


@dataclass
class MicroTrace:
    """The trace of a micro-batch."""

    #: Digest of each sample's values by its index, in order.
    samples: Digests = field(default_factory=dict)
    #: Calls of modules, in the order in which they began.
    calls: list[Call] = field(default_factory=list)
    #: Operations, in the order in which they ran.
    operations: list[Operation] = field(default_factory=list)
    loss: Digests = field(default_factory=dict)  #: Digest of each term of the loss.
    value: float = math.nan  #: The loss.
    #: Digest of the gradient of each parameter, by name.
    gradients: Digests = field(default_factory=dict)


@dataclass
class StepTrace:
    """The trace of a step: digests by name."""

    #: The micro-batches, by their index as text, in order.
    micro_batches: dict[str, MicroTrace] = field(default_factory=dict)
    summed: Digests = field(default_factory=dict)  #: Summed gradients, if they are traced.
    gradients: Digests = field(default_factory=dict)  #: As the optimizer has received them.
    buffers: Digests = field(default_factory=dict)  #: After the step.
    weights: Digests = field(default_factory=dict)  #: After the step.
    optimizer: Digests = field(default_factory=dict)  #: Its state after the step.
    values: dict[str, float] = field(default_factory=dict)  #: Loss, gradient norm, learning rate.
    #: The tensors of the wanted keys, in a list for each; none in a trace that crosses processes.
    kept: dict[Key, list[Any]] = field(default_factory=dict)


@dataclass
class Trace:
    """The trace of the first steps of a training."""

    start: dict[str, Digests] = field(default_factory=dict)  #: What it starts from.
    #: The steps, by their numbers as text.
    steps: dict[str, StepTrace] = field(default_factory=dict)
    evaluation: dict[str, str] = field(default_factory=dict)  #: Each metric, as text.
    environment: dict[str, str] = field(default_factory=dict)  #: Versions, processor, kernels.

    def to_plain(self) -> dict[str, Any]:
        """Return the trace as plain values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Trace":
        """Read a trace from what `to_plain` has returned."""
        return TypeAdapter(cls).validate_python(plain)


def in_order(micro_batches: dict[str, MicroTrace]) -> dict[str, MicroTrace]:
    """Return micro-batches in the order of their indices."""
    return {index: micro_batches[index] for index in sorted(micro_batches, key=int)}


_OWNER = "samebits module"  # key in the metadata of a backward node
_UNSET = ("aten.empty", "aten.new_empty")  # their values are whatever was in memory


class Recorder:
    """Records what steps compute.

    Args:
        modules, optimizers: Those of the loop.
        detail: STATE, CALLS, OPERATIONS or EVERYTHING.
        keep: Whether to keep the tensors of a key.
        is_compiled: Whether torch.compile has compiled the model: hooks would change what it generates.

    Attributes:
        model: All modules in one.
        kinds: The class of each module, by name.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        *,
        detail: int = CALLS,
        keep: Callable[[Key], bool] = lambda _: False,
        is_compiled: bool = False,
    ) -> None:
        self.model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self.kinds = {name: type(module).__name__ for name, module in self.model.named_modules()}
        self._optimizers = optimizers
        self._detail = detail
        self._keep = keep
        self._is_compiled = is_compiled
        # The micro-batch of this thread: with synchronized batch norm, each one has its own thread.
        self._current = threading.local()
        self._last = 0
        self._num_started = 0
        # By micro-batch, not for the recorder: synchronized ones are interleaved.
        self._open: dict[int, list[int]] = {}  # numbers of the calls that run, by micro-batch
        self._phase: dict[int, str] = {}
        self._listing: dict[int, Any] = {}  # contexts of those calls, by micro-batch
        self._trace = StepTrace()
        self._handles: list[Any] = []
        for name, parameter in self.model.named_parameters() if detail == EVERYTHING else ():
            if parameter.requires_grad:  # torch refuses a hook on a frozen parameter
                self._handles.append(parameter.register_hook(partial(self._gradient, name)))
        for name, module in () if is_compiled or detail == STATE else self.model.named_modules():
            before = module.register_forward_pre_hook(
                partial(self._enter, name), with_kwargs=True, prepend=True
            )
            # Always: operations would be listed after a forward pass that fails.
            after = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            self._handles += [before, after]

    def start(self, index: int, samples: Digests, batch: Any = None) -> None:
        """Begin a micro-batch of this thread, with the digest of each of its samples."""
        self._current.index = self._last = index
        self._open[index] = []
        self._phase[index] = FORWARD
        self._num_started += 1
        # As text, since keys of JSON are: a trace crosses processes.
        self._trace.micro_batches[str(index)] = MicroTrace(samples)
        self._keep_if_wanted((BATCH, index, 0), batch)

    def pause(self) -> None:
        """Record nothing until the next micro-batch."""
        self._phase[self._index] = ""

    def end_forward(self) -> None:
        """Note that the loss of the current micro-batch is computed next."""
        self._phase[self._index] = LOSS

    def loss(self, terms: Mapping[str, Any]) -> None:
        """Record the loss of the current micro-batch: its terms by name. The backward pass follows."""
        index = self._index
        if not self._phase.get(index):
            return
        tensors = {name: term for name, term in terms.items() if isinstance(term, Tensor)}
        micro_batch = self._trace.micro_batches[str(index)]
        with _disable_current_modes():  # what the recorder computes must not be traced
            micro_batch.loss = digests(tensors)
            micro_batch.value = sum(float(term.detach().sum()) for term in tensors.values())
            self._keep_if_wanted((LOSS, index, 0), list(tensors.values()))
        self._phase[index] = BACKWARD

    def take_sums(self) -> None:
        """Record the summed gradients, before they are clipped."""
        if self._detail == EVERYTHING:
            self._trace.summed = self._take(SUMMED)

    def values(self) -> dict[str, float]:
        """Return the mean loss of the step's micro-batches, the norm of its gradient, and the learning rate."""
        losses = [each.value for each in self._trace.micro_batches.values()]
        squares = sum(
            float(each.detach().double().square().sum()) for each in gradients(self.model).values()
        )
        return {
            "loss": sum(losses) / max(1, len(losses)),
            "norm": math.sqrt(squares),
            "lr": float(self._optimizers[0].param_groups[0]["lr"]),
        }

    def step(self, values: dict[str, float]) -> StepTrace:
        """Return the trace of the step that has ended, with these values."""
        found = self._trace
        found.values = values
        # After the update: torch's optimizers leave the gradients as they have received them.
        if self._detail != STATE:  # an own loop may leave gradients of this rank alone
            found.gradients = self._take(APPLIED)
        found.buffers = digests(dict(self.model.named_buffers()))
        found.weights = digests(dict(self.model.named_parameters()))
        for each in self._optimizers:
            found.optimizer |= optimizer_state(self.model, each)
        found.micro_batches = in_order(found.micro_batches)
        self._trace = StepTrace()
        # What follows belongs to no micro-batch, such as an evaluation.
        self._phase.clear()
        return found

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def traced(
        self, job: "Job", loader: Any, before: Callable[[MicroBatch], None] = lambda _: None
    ) -> Iterator[Any]:
        """See the steps of a job, which have to read from the loader that this yields.

        Args:
            before: Called before each micro-batch.
        """
        reducer = job.reducer
        parts = job.parts
        read: dict[int, Batch] = {}

        def loss(outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
            self.end_forward()
            with self.traced_operations():
                terms = parts.loss(outputs, batch)
            if isinstance(terms, Mapping):
                self.loss(terms)
            return terms

        def read_batch(indices: Any, *request: Any, **how: Any) -> Batch:
            # By identity: the micro-batch has this array. It is read before the micro-batch begins.
            read[id(indices)] = loader.batch(indices, *request, **how)
            return read[id(indices)]

        @contextmanager
        def micro_batch(each: MicroBatch) -> Iterator[None]:
            before(each)
            batch = read.pop(id(each.indices))
            samples = {str(index): value for index, value in sample_digests(batch).items()}
            # Inside, since synchronized micro-batches get their thread there.
            with reducer.micro_batch(each):
                self.start(each.index, samples, (batch.inputs, batch.targets))
                yield

        def backward(total: Tensor, extras: Tensor | None = None) -> None:
            with self.traced_operations():
                reducer.backward(total, extras)

        def reduce(flag: float = 0.0) -> None:
            reducer.reduce(flag)
            self.take_sums()

        traced: Any = _Traced(reducer, micro_batch=micro_batch, backward=backward, reduce=reduce)
        job.reducer = traced
        job.parts = replace(parts, loss=loss)
        try:
            yield _Traced(loader, batch=read_batch)
        finally:
            job.reducer = reducer
            job.parts = parts  # an evaluation is not recorded
            self.remove()

    @property
    def _index(self) -> int:
        """The current micro-batch. A GPU's backward pass runs in a thread of its own, for the latest one."""
        return getattr(self._current, "index", self._last)

    def _take(self, kind: str) -> Digests:
        found = gradients(self.model)
        for name, gradient in found.items():
            self._keep_if_wanted((kind, 0, name), gradient)
        return digests(found)

    def _keep_if_wanted(self, key: Key, value: Any) -> None:
        if self._keep(key):
            # clone: for a tensor on the CPU, cpu() makes no copy, and later operations change it in place.
            self._trace.kept[key] = [each.detach().cpu().clone() for each in tensors_in(value)]

    def traced_operations(self) -> Any:
        """Return a context in which the operations of the current micro-batch are traced, if they are to be."""
        is_wanted = self._detail == EVERYTHING or (
            self._detail == OPERATIONS
            and self._num_started == 1
            and self._phase[self._index] == FORWARD
        )
        return _Operations(self) if is_wanted and not self._is_compiled else nullcontext()

    def operation(self, name: str, result: Any) -> None:
        """Record an operation."""
        index = self._index
        tensors = tensors_in(result)
        phase = self._phase[index]
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
        operations = self._trace.micro_batches[str(index)].operations
        self._keep_if_wanted((OPERATION, index, len(operations)), tensors)
        operations.append(Operation(phase, name, node, call, digest(tensors)))

    def _gradient(self, name: str, gradient: Tensor) -> None:
        index = self._index
        if self._phase.get(index):
            with _disable_current_modes():
                micro_batch = self._trace.micro_batches[str(index)]
                micro_batch.gradients[name] = digest(gradient)
                self._keep_if_wanted((GRADIENT, index, name), gradient)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        index = self._index
        if self._phase.get(index) != FORWARD:
            return  # recomputed activations, or modules of the loss
        opened = self._open[index]
        calls = self._trace.micro_batches[str(index)].calls
        with _disable_current_modes():
            inputs = digest((args, kwargs))
        calls.append(Call(name, type(module).__name__, opened[-1] if opened else None, inputs))
        if not opened:
            # From here on, not from `start`: an own loop has no place where it could end after an error.
            self._listing[index] = self.traced_operations()
            self._listing[index].__enter__()
        opened.append(len(calls) - 1)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        index = self._index
        # Empty for modules of the loss, and for activations that the backward pass computes again.
        if not self._open.get(index):
            return
        number = self._open[index].pop()
        calls = self._trace.micro_batches[str(index)].calls
        with _disable_current_modes():
            calls[number].output = digest(output)
            self._keep_if_wanted((CALL, index, number), output)
        if self._detail == EVERYTHING:
            _own(number, tensors_in(output), tensors_in((args, kwargs)))
        if not self._open[index]:
            self._listing.pop(index).__exit__(None, None, None)


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

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recorder.operation(str(func).rpartition(".")[0], result)
        return result


class _Traced:
    """An object some of whose methods are others; all else is the object's own, also what is set."""

    def __init__(self, own: Any, **others: Any) -> None:
        vars(self).update(own=own, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.own, name, value)
