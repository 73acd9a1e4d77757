"""Digests of what a step computes, and the first difference between the records of two trials."""

import hashlib
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from samebits.bits import as_bytes, plain_in, tensors_in
from samebits.parallel.checksum import checksums

# Digests of what a step computes: the inputs and outputs of each module, loss terms, gradients, buffers, weights.


Event = tuple[str, str, str]
INPUT = "input"
OUTPUT = "output"
ROOT = ""  # the name of the model itself among its modules


def digest_of(value: Any) -> str:
    """Return a digest of all tensors and plain values in a value, 16 hex digits."""
    text = repr(([_of_tensor(tensor) for tensor in tensors_in(value)], list(plain_in(value))))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests(tensors: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Return a digest of each tensor, of any shape, by name; of missing ones none."""
    return {name: _of_tensor(tensor) for name, tensor in tensors.items() if tensor is not None}


def _of_tensor(tensor: Tensor) -> str:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type == "cpu":  # quicker than checksums, and good enough for a few steps
        value = zlib.crc32(as_bytes(tensor).numpy().data)
    else:
        value = checksums({"": tensor})[""] & (1 << 64) - 1
    return f"{tensor.dtype} {tuple(tensor.shape)} {value:x}"


def gradients(model: nn.Module) -> dict[str, str]:
    """Return digests of the gradients, in the order of the backward pass: the last parameter first."""
    return digests(
        {name: parameter.grad for name, parameter in reversed(list(model.named_parameters()))}
    )


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
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


class ModuleRecorder:
    """Records the digests of each module's inputs and outputs, in the order in which they are computed.

    Micro-batches may run in threads (batch_norm=sync), so the current list of events is a thread's own.

    Args:
        has_operations: Also list the operations of each module in the first forward pass.

    Attributes:
        kinds: The class of each module, by name.
        operations: Names of the operations of each module, without those of the modules inside of it.
    """

    def __init__(self, model: nn.Module, *, has_operations: bool = False) -> None:
        self._current = threading.local()
        self._handles = []
        self._lister = _Lister() if has_operations else None
        self.kinds: dict[str, str] = {}
        self.operations: dict[str, list[str]] = {}
        for name, module in model.named_modules():
            self.kinds[name] = type(module).__name__
            self._handles.append(
                module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            )
            # Always: a lister that a failed forward pass leaves behind would list the rest of the script.
            self._handles.append(module.register_forward_hook(self._after(name), always_call=True))

    def start(self) -> list[Event]:
        """Start a new list of events in this thread, and return it."""
        self._current.events = events = list[Event]()
        return events

    def stop(self) -> None:
        """Record no more in this thread."""
        self._current.events = None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, keywords: Any) -> None:
            if (events := getattr(self._current, "events", None)) is not None:
                with self._unlisted():
                    events.append((INPUT, name, digest_of((inputs, keywords))))
                if self._lister is not None:
                    self._lister.enter(self.operations.setdefault(name, []))

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if (events := getattr(self._current, "events", None)) is not None:
                with self._unlisted():
                    events.append((OUTPUT, name, digest_of(outputs)))
                if self._lister is not None and self._lister.leave():
                    self._lister = None

        return hook

    def _unlisted(self) -> Any:
        """Return a context in which the recorder's own operations are not listed."""
        return nullcontext() if self._lister is None else _disable_current_modes()


class _Lister(TorchDispatchMode):
    """Lists the operations of one forward pass by module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open: list[list[str]] = []

    def enter(self, operations: list[str]) -> None:
        """Begin a module, whose operations go into a list."""
        if not self._open:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(operations)

    def leave(self) -> bool:
        """End a module; return whether it was the outermost one."""
        self._open.pop()
        if not self._open:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return not self._open

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._open[-1].append(str(func).rpartition(".")[0])
        return func(*args, **(kwargs or {}))


# Comparison of the records of trials: the first difference, in the order in which a run computes.


# What a step computes, in order; the first two by micro-batch, with the modules' events between them.
SAMPLES, FORWARD, LOSS, GRADIENTS, BUFFERS, WEIGHTS, OPTIMIZER, EVALUATION = (
    "samples", "forward", "loss", "gradients", "buffers", "weights", "optimizer", "evaluation",
)  # fmt: skip
START = "start"
RANKS = "ranks"
_AFTER = (GRADIENTS, BUFFERS, WEIGHTS, OPTIMIZER)
TrialTrace = Mapping[str, Any]


@dataclass(frozen=True)
class TrialDifference:
    """The first difference between two trials."""

    stage: str  #: One of the constants of this module.
    step: int | None  #: Step, from 0; None before the first one and in the evaluation.
    micro_batch: int | None  #: Micro-batch of the step, from 0; None after the sum over them.
    name: str  #: The sample, module, loss term, tensor or metric.
    #: For FORWARD, whether the input or the output of the module differs; for the evaluation, both values.
    detail: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Where in a run this is, for comparison with others."""
        order = (START, SAMPLES, FORWARD, LOSS, *_AFTER)
        if self.stage == EVALUATION:
            return 1 << 40, 0
        return -1 if self.step is None else self.step, order.index(self.stage)


def merge_ranks(records: Sequence[TrialTrace]) -> tuple[dict[str, Any], TrialDifference | None]:
    """Merge the records of a world's ranks.

    Returns:
        The record of the whole world, and the first difference between ranks in what they all must have.
    """
    first = records[0]
    merged: dict[str, Any] = {
        "start": first["start"],
        "steps": {},
        "evaluation": first["evaluation"],
    }
    found: TrialDifference | None = None
    for number, step in first["steps"].items():
        leaves: dict[str, Any] = {}
        for record in records:
            leaves |= record["steps"][number]["micro-batches"]
            for stage in _AFTER:
                if (
                    found is None
                    and (name := _differing(step[stage], record["steps"][number][stage]))
                    is not None
                ):
                    found = TrialDifference(stage, int(number), None, name)
        merged["steps"][number] = {**step, "micro-batches": leaves}
    return merged, found


def first_difference(reference: TrialTrace, other: TrialTrace) -> TrialDifference | None:
    """Return the first difference between two worlds; of a resumed one only its own steps count."""
    for part, values in other["start"].items():
        if (name := _differing(reference["start"].get(part, {}), values)) is not None:
            return TrialDifference(START, None, None, f"{part} {name}".strip())
    for number, step in other["steps"].items():
        if number not in reference["steps"]:
            continue
        if (found := _in_step(int(number), reference["steps"][number], step)) is not None:
            return found
    name = _differing(reference["evaluation"], other["evaluation"])
    if name is None:
        return None
    values = f"{reference['evaluation'].get(name)} and {other['evaluation'].get(name)}"
    return TrialDifference(EVALUATION, None, None, name, values)


def _in_step(number: int, reference: TrialTrace, other: TrialTrace) -> TrialDifference | None:
    one = reference["micro-batches"]
    two = other["micro-batches"]
    leaves = sorted(one, key=int)
    for leaf in leaves:
        if (name := _differing(one[leaf]["samples"], two[leaf]["samples"])) is not None:
            return TrialDifference(SAMPLES, number, int(leaf), name)
    for leaf in leaves:
        if (found := first_in_pass(one[leaf], two[leaf])) is not None:
            stage, name, detail = found
            return TrialDifference(stage, number, int(leaf), name, detail)
    for stage in _AFTER:
        if (name := _differing(reference[stage], other[stage])) is not None:
            return TrialDifference(stage, number, None, name)
    return None


def first_in_pass(one: TrialTrace, other: TrialTrace) -> tuple[str, str, str] | None:
    """Return stage, name and detail of the first difference between two passes of a micro-batch."""
    events = list(map(tuple, one["modules"]))
    others = list(map(tuple, other["modules"]))
    for place, event in enumerate(events):
        if place >= len(others) or others[place] != event:
            is_same_call = place < len(others) and others[place][:2] == event[:2]
            return FORWARD, event[1], event[0] if is_same_call else INPUT
    if len(others) > len(events):
        return FORWARD, others[len(events)][1], OUTPUT
    for stage in (LOSS, GRADIENTS, BUFFERS):
        if (name := _differing(one.get(stage, {}), other.get(stage, {}))) is not None:
            return stage, name, ""
    return None


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)
