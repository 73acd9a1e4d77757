"""The first difference between two trainings: step, part of the step, micro-batch, and module or tensor.

    for each step       samples
      micro-batches     forward -> loss -> backward
      then              gradients -> buffers, weights, optimizer state
    at the end          evaluation

In the forward pass of the same modules, the first input or output that differs counts. Between other modules, the first
call is searched whose inputs occur in both, and whose output does not; then the same among the calls inside of it. A
value counts as equal wherever the other one has it, so that renamed, split or reordered modules count only if they
change a value that others use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits.bits import Element, element_at, first_element
from samebits.provenance.record import NO_DIGEST, StepRecord
from samebits.replay.trace import (
    Call,
    Digests,
    MicroTrace,
    StepTrace,
    Trace,
    events,
    in_order,
    returned,
)

# What a step computes, in order; the first three by micro-batch.
SAMPLES, FORWARD, LOSS, BACKWARD, SUMS, GRADIENTS, BUFFERS, WEIGHTS, OPTIMIZER, EVALUATION = (
    "samples", "forward", "loss", "backward", "summed", "gradients", "buffers", "weights", "optimizer", "evaluation",
)  # fmt: skip
START = "start"
RANKS = "ranks"
# After the micro-batches, with the attributes of a trace that have these names.
_AFTER = (SUMS, GRADIENTS, BUFFERS, WEIGHTS, OPTIMIZER)
STAGES = (START, SAMPLES, FORWARD, LOSS, BACKWARD, *_AFTER)
INPUT = "input"
OUTPUT = "output"
ROOT = ""  # the name of the model itself among its modules
MODEL = "(the model)"
Tensors = Mapping[str, Tensor]  # of any shape, by name
_STANDS_OUT = 4.0  # times as much as any other module


@dataclass(frozen=True)
class TraceDifference:
    """The first difference between two traces."""

    stage: str  #: One of the constants of this module.
    step: int | None  #: Step, from 0; None before the first one and in the evaluation.
    micro_batch: int | None  #: Micro-batch of the step, from 0; None after the sum over them.
    name: str  #: The sample, module, loss term, tensor or metric.
    #: For FORWARD, whether the input or the output of the module differs; for the evaluation, both values.
    detail: str = ""
    #: For FORWARD, the number of the call in either trace whose result differs; None where there is none.
    calls: tuple[int | None, int | None] = (None, None)

    @property
    def place(self) -> tuple[int, int]:
        """Where in a run this is, for comparison with others."""
        if self.stage == EVALUATION:
            return 1 << 40, 0
        return -1 if self.step is None else self.step, STAGES.index(self.stage)


def merge_ranks(traces: Sequence[Trace]) -> tuple[Trace, TraceDifference | None]:
    """Merge the traces of a world's ranks.

    Returns:
        The trace of the whole world, and the first difference between ranks in what they all must have.
    """
    first = traces[0]
    found: TraceDifference | None = None
    steps = {}
    for number, step in first.steps.items():
        every = [trace.steps[number] for trace in traces if number in trace.steps]
        for other in every:
            found = found or _after(int(number), step, other)
        micro_batches = {index: each for one in every for index, each in one.micro_batches.items()}
        steps[number] = replace(step, micro_batches=in_order(micro_batches))
    return replace(first, steps=steps), found


def first_difference(reference: Trace, other: Trace) -> TraceDifference | None:
    """Return the first difference between two worlds; of a resumed one only its own steps count."""
    for part, values in other.start.items():
        if (name := differing(reference.start.get(part, {}), values)) is not None:
            return TraceDifference(START, None, None, f"{part} {name}".strip())
    for number, step in other.steps.items():
        if number in reference.steps:
            found = difference_of_step(reference.steps[number], step, int(number))
            if found is not None:
                return found
    name = differing(reference.evaluation, other.evaluation)
    if name is None:
        return None
    both = f"{reference.evaluation.get(name)} and {other.evaluation.get(name)}"
    return TraceDifference(EVALUATION, None, None, name, both)


def difference_of_step(
    reference: StepTrace, other: StepTrace, number: int = 0
) -> TraceDifference | None:
    """Return the first difference of a step."""
    # Samples of all micro-batches first: they are known before the step begins.
    pairs = [
        (int(index), one, other.micro_batches.get(index, MicroTrace()))
        for index, one in reference.micro_batches.items()
    ]
    for index, one, two in pairs:
        name = differing(one.samples, two.samples)
        if name is None and list(one.samples) != list(two.samples):
            name = next(
                first
                for first, second in zip(one.samples, two.samples, strict=False)
                if first != second
            )
        if name is not None:
            return TraceDifference(SAMPLES, number, index, name)
    if len(other.micro_batches) > len(pairs):
        return TraceDifference(SAMPLES, number, len(pairs), "")
    for index, one, two in pairs:
        if (found := difference_of_pass(one, two)) is not None:
            return replace(found, step=number, micro_batch=index)
    return _after(number, reference, other)


def _after(number: int, reference: StepTrace, other: StepTrace) -> TraceDifference | None:
    for stage in _AFTER:
        one = getattr(reference, stage)
        if (
            names := unequal(_in_order(stage, one), _in_order(stage, getattr(other, stage)))
        ) is not None:
            return TraceDifference(stage, number, None, names[0] or names[1])
    return None


def _in_order(stage: str, digests: Digests) -> Digests:
    # Gradients in the order of the backward pass: the last parameter first.
    return (
        dict(reversed(list(digests.items()))) if stage in (SUMS, GRADIENTS, BACKWARD) else digests
    )


def difference_of_pass(one: MicroTrace, other: MicroTrace) -> TraceDifference | None:
    """Return the first difference between two passes of a micro-batch."""
    if (found := _difference_of_calls(one, other)) is not None:
        return found
    for stage, a, b in (
        (LOSS, one.loss, other.loss),
        (BACKWARD, one.gradients, other.gradients),
    ):
        if (names := unequal(_in_order(stage, a), _in_order(stage, b))) is not None:
            return TraceDifference(stage, None, None, names[0] or names[1])
    return None


def _difference_of_calls(a: MicroTrace, b: MicroTrace) -> TraceDifference | None:
    structures = ([(each.name, each.parent) for each in trace.calls] for trace in (a, b))
    if next(structures) == next(structures):
        for number, is_end in events(a.calls):
            call, same = a.calls[number], b.calls[number]
            if is_end and call.output != same.output:
                return TraceDifference(FORWARD, None, None, call.name, OUTPUT, (number, number))
            if not is_end and call.inputs != same.inputs:
                # Computed by the module around it.
                at = number if call.parent is None else call.parent
                return TraceDifference(FORWARD, None, None, call.name, INPUT, (at, at))
        return None
    # Names of other modules mean nothing, so values are compared.
    values = values_of(a), values_of(b)
    one, other = _first_call(a.calls, None, values[1]), _first_call(b.calls, None, values[0])
    if one is None and other is None:
        return None
    while one is not None and other is not None:
        inner = _first_call(a.calls, one, values[1]), _first_call(b.calls, other, values[0])
        # Where only one has such a call, the other one's place is the module around it.
        one = one if inner[0] is None else inner[0]
        other = other if inner[1] is None else inner[1]
        if None in inner:
            break
    call = a.calls[one] if one is not None else b.calls[other or 0]
    return TraceDifference(FORWARD, None, None, call.name, OUTPUT, (one, other))


def values_of(trace: MicroTrace) -> set[str]:
    """Return the digests of all values that a micro-batch computed or used."""
    found = {each.output for each in trace.operations}
    return found | {value for call in trace.calls for value in (call.inputs, call.output)}


def _first_call(calls: Sequence[Call], parent: int | None, others: set[str]) -> int | None:
    """Return the first call inside of a call whose inputs the other one has, and whose output it has not."""
    for number, call in returned(calls):
        if call.parent == parent and call.inputs in others and call.output not in others:
            return number
    return None


def unequal(a: Digests, b: Digests) -> tuple[str, str] | None:
    """Return the names of the first values that differ: by name, or by position where names differ."""
    if a.keys() == b.keys():
        name = next((name for name in a if a[name] != b[name]), None)
        return None if name is None else (name, name)
    pairs = zip(a.items(), b.items(), strict=False)
    found = next(((one, other) for (one, x), (other, y) in pairs if x != y), None)
    if found is not None or len(a) == len(b):
        return found
    return next(iter(a), ""), next(iter(b), "")


def differing(one: Digests, other: Digests) -> str | None:
    """Return the name of the first value that differs, or that only one has."""
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)


# Steps, by the fields of their records.


@dataclass(frozen=True)
class Change:
    """A value that differs between two runs."""

    name: str  #: What differs.
    a: str  #: Its value in the first run, or in the record; "none" if it has none.
    b: str  #: Its value in the second run, or in the replay.


# What is compared, and the attribute of `StepRecord`. What a step reads comes before what follows from it.
NAMES = {
    "samples": "samples",
    "samples' values": "content",
    "learning rate": "lr",
    "loss": "loss",
    "gradient norm": "norm",
    "outcome": "outcome",
}


def changed_fields(a: StepRecord | None, b: StepRecord) -> list[Change]:
    """Return the fields of two records whose bits differ, in the order of `NAMES`; none if there is no record."""
    # By bytes, since NaN is not equal to itself.
    if a is None or a.to_bytes() == b.to_bytes():
        return []
    values = {
        name: (value_text(getattr(a, each)), value_text(getattr(b, each)))
        for name, each in NAMES.items()
    }
    if NO_DIGEST in (a.content, b.content):  # not recorded, or not computed again
        del values["samples' values"]
    return [Change(name, one, other) for name, (one, other) in values.items() if one != other]


def value_text(value: object) -> str:
    """Return a value of a record or a run folder as text, which has all bits of a number."""
    if isinstance(value, bytes):
        return value.hex()
    return repr(value) if isinstance(value, float) else str(value)


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    """Return the values that differ, or that only one has, by name."""
    return [
        Change(name, *(value_text(each[name]) if name in each else "none" for each in (a, b)))
        for name in dict.fromkeys([*a, *b])
        if name not in a or name not in b or a[name] != b[name]
    ]


# Tensors by their bits.


def module_of(tensor: str) -> str:
    """Return the name of the module that a parameter or buffer belongs to."""
    return tensor.rpartition(".")[0] or MODEL


def first_tensor(a: Tensors, b: Tensors) -> tuple[str, Element] | None:
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


def largest_difference(a: Tensors, b: Tensors) -> tuple[str, Element] | None:
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
    return name, element_at(at, a[name], b[name])
