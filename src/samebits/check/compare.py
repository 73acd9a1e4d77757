"""Comparison of the records of trials: the first difference, in the order in which a run computes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samebits.check.digest import INPUT, OUTPUT

# What a step computes, in order; the first two by micro-batch, with the modules' events between them.
SAMPLES, FORWARD, LOSS, GRADIENTS, BUFFERS, WEIGHTS, OPTIMIZER, EVALUATION = (
    "samples", "forward", "loss", "gradients", "buffers", "weights", "optimizer", "evaluation",
)  # fmt: skip
START, RANKS = "start", "ranks"
_AFTER = (GRADIENTS, BUFFERS, WEIGHTS, OPTIMIZER)
Record = Mapping[str, Any]


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


def merge_ranks(records: Sequence[Record]) -> tuple[dict[str, Any], TrialDifference | None]:
    """Merge the records of a world's ranks.

    Returns:
        The record of the whole world, and the first difference between ranks in what they all must have.
    """
    first = records[0]
    merged: dict[str, Any] = {"start": first["start"], "steps": {}, "evaluation": first["evaluation"]}
    found: TrialDifference | None = None
    for number, step in first["steps"].items():
        leaves: dict[str, Any] = {}
        for record in records:
            leaves |= record["steps"][number]["micro-batches"]
            for stage in _AFTER:
                if found is None and (name := _differing(step[stage], record["steps"][number][stage])) is not None:
                    found = TrialDifference(stage, int(number), None, name)
        merged["steps"][number] = {**step, "micro-batches": leaves}
    return merged, found


def first_difference(reference: Record, other: Record) -> TrialDifference | None:
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


def _in_step(number: int, reference: Record, other: Record) -> TrialDifference | None:
    one, two = reference["micro-batches"], other["micro-batches"]
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


def first_in_pass(one: Record, other: Record) -> tuple[str, str, str] | None:
    """Return stage, name and detail of the first difference between two passes of a micro-batch."""
    events, others = list(map(tuple, one["modules"])), list(map(tuple, other["modules"]))
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
