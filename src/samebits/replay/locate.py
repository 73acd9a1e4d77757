"""The first difference between two runs: within a step's traces, and in places that no trace shows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from samebits.bits import Element
from samebits.provenance.record import StepRecord
from samebits.replay.compare import (
    BUFFERS,
    GRADIENTS,
    MODEL,
    OPTIMIZER,
    SAMPLES,
    SUMS,
    WEIGHTS,
    changed_fields,
    difference_of_step,
    first_tensor,
    largest_difference,
    module_of,
    unequal,
    values_of,
)
from samebits.replay.stepper import ReplayedRun
from samebits.replay.trace import (
    APPLIED,
    BATCH,
    CALL,
    FORWARD,
    GRADIENT,
    LOSS,
    OPERATION,
    SUMMED,
    Key,
    MicroTrace,
    Operation,
    StepTrace,
)
from samebits.storage.checkpoint import AVERAGE

# The place of the first difference between two runs, and those places that no trace of a step shows.


Sides = tuple[ReplayedRun, ReplayedRun]
# Fields of a record that name the place of a difference.
_PLACES = {
    "samples": ("samples", "(order of samples)"),
    "samples' values": ("sample values", "(data)"),
    "learning rate": ("learning rate", "(optimizer)"),
}


@dataclass(frozen=True)
class Location:
    """The first difference between two runs."""

    step: int  #: The step that differs, from 0; for a state, the number of steps done.
    phase: str  #: Part of the step, or "initial weights", "stored state", "not reproduced".
    micro_batch: int | None = None  #: The micro-batch.
    module: str = ""  #: The module.
    operation: str = ""  #: The operation.
    element: str = ""  #: The value that differs, with the index of its first element.
    a: str = ""  #: Value in the first run.
    b: str = ""  #: Value in the second run.
    samples: list[int] = field(default_factory=list)  #: Samples of the micro-batch.
    notes: list[str] = field(default_factory=list)  #: What else was found, one line each.
    num_replays: int = 0  #: How often a part of a run was replayed.


def describe_initial(sides: Sides) -> Location:
    """Describe a difference of the initial weights."""
    tensors = [side.tensors() for side in sides]
    found = first_tensor(*tensors)
    assert found is not None, "the states differ"
    notes = []
    plans = [side.plan().micro_batches[0].indices.tolist() for side in sides]
    if plans[0] != plans[1]:
        notes.append(
            f"the first micro-batch has other samples too: {plans[0][:4]} / {plans[1][:4]} …"
        )
    return _of_tensor(0, "initial weights", found, notes)


def describe_update(
    sides: Sides, records: tuple[StepRecord, StepRecord], notes: list[str]
) -> Location:
    """Describe a difference that begins after the gradients: learning rate, buffers or update.

    Args:
        sides, records, notes: Both runs and their records after the step, and notes for the description.
    """
    a, b = records
    kinds = [type(side.job.optimizer).__name__ for side in sides]
    optimizer = kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} in a, {kinds[1]} in b"
    tensors = [side.tensors() for side in sides]
    buffers = {name for name, _ in sides[0].job.model.named_buffers()}
    first = first_tensor(
        *({name: each[name] for name in each if name in buffers} for each in tensors)
    )
    if first is not None:
        return _of_tensor(a.step, "buffers", first, notes)
    if a.lr != b.lr:
        return Location(
            a.step, "learning rate", module="(optimizer)", operation=optimizer, element="learning rate", a=repr(a.lr),
            b=repr(b.lr), notes=notes,
        )  # fmt: skip
    found = first_tensor(*tensors)
    if found is None:
        fields = (
            f"outcome {a.outcome} / {b.outcome}, gradient norm {a.norm!r} / {b.norm!r}, "
            f"loss {a.loss!r} / {b.loss!r}"
        )
        return Location(a.step, "sums over the step", element=fields, notes=notes)
    phase = "moving average" if found[0].startswith(AVERAGE) else "update"
    return replace(_of_tensor(a.step, phase, found, notes), operation=optimizer)


def describe_not_reproduced(sides: Sides, agrees: Sequence[bool], record: StepRecord) -> Location:
    """Describe a step at which both replays agree, and the record of a run differs.

    Args:
        sides: Both runs, after the step.
        agrees, record: Whether each one's replay agrees with its record, and the step's record in both.
    """
    step = sides[0].step_number - 1
    wrong = [side for side, is_as_recorded in zip(sides, agrees, strict=True) if not is_as_recorded]
    names = " and ".join(side.name for side in wrong)
    notes = [
        f"both replays agree at this step, but {names} recorded other values: code, data, versions or hardware were "
        "others then, or a machine made an error"
    ]
    side = wrong[0]
    recorded = side.recorded.log.get(step)
    assert recorded is not None
    first = changed_fields(recorded, record)[0]
    if first.name in _PLACES:
        phase, module = _PLACES[first.name]
        values = (first.a, first.b) if side.name == "a" else (first.b, first.a)
        return Location(
            step, phase, module=module, element=first.name, a=values[0], b=values[1], notes=notes
        )
    following = [each for each in sorted(side.recorded.checkpoints) if each > step]
    if len(wrong) == 2 or not following:
        return Location(step, "not reproduced", notes=notes)
    # A changed weight stays changed, so the largest difference in the next checkpoint may show where it was.
    side.advance(following[0])
    file, stored, replayed = next(side.stored(following[0]))
    largest = largest_difference(stored, replayed)
    if largest is None:
        return Location(step, "not reproduced", notes=notes)
    element = largest[1]
    notes.append(
        f"{side.name}/{file} differs from the replay in this module most; both values are of {side.name}:"
    )
    notes.append(f"{element.a} stored, {element.b} replayed")
    return replace(_of_tensor(step, "not reproduced", largest, notes), a="", b="")


def find_altered(sides: Sides, step: int) -> Location | None:
    """Compare the stored states after a number of steps with the replays, which agree."""
    for side in sides:
        for file, stored, replayed in side.stored(step):
            found = first_tensor(stored, replayed)
            if found is None:
                continue
            notes = [
                f"{side.name}/{file} is not what the steps of {side.name} lead to: it was altered"
            ]
            place = _of_tensor(step, "stored state", found, notes)
            # The other run has the replayed value.
            return place if side.name == "a" else replace(place, a=place.b, b=place.a)
    averages = [side.job.average for side in sides]
    if (averages[0] is None) != (averages[1] is None):
        name = next(iter(sides[0].job.state()))
        kinds = ["none" if average is None else "an average of each weight" for average in averages]
        return Location(
            0, "moving average", module=module_of(name), element="average", a=kinds[0], b=kinds[1]
        )
    return None


def _of_tensor(step: int, phase: str, found: tuple[str, Element], notes: list[str]) -> Location:
    name, element = found
    module = module_of(name.removeprefix(AVERAGE))
    where = f"{name} {element.index}".rstrip()
    return Location(
        step, phase, module=module, element=where, a=element.a, b=element.b, notes=notes
    )


# The place of the first difference within the traces of a step, with the tensors to look at.


Calls = tuple[int | None, int | None]
Keys = list[tuple[Key, Key]]  # of tensors to compare element by element, best first


def locate(number: int, a: StepTrace, b: StepTrace) -> tuple[Location, Keys] | None:
    """Return the first difference of a step before the update; None if both runs have equal gradients.

    Args:
        number: The step.

    Returns:
        The place, and the keys of the tensors that differ there.
    """
    found = difference_of_step(a, b)
    if found is None or found.stage in (BUFFERS, WEIGHTS, OPTIMIZER):
        return None
    if found.stage in (SUMS, GRADIENTS):
        kind, phase = (
            (SUMMED, "sum of the gradients")
            if found.stage == SUMS
            else (APPLIED, "clipping of the gradient")
        )
        names = unequal(getattr(a, found.stage), getattr(b, found.stage))
        assert names is not None
        place = Location(
            number, phase, module=module_of(names[0]), element=f"gradient of {names[0]}"
        )
        return place, [((kind, 0, names[0]), (kind, 0, names[1]))]
    index = found.micro_batch or 0
    if found.stage == SAMPLES:
        every = [list(step.micro_batches.values()) for step in (a, b)]
        order = _order_of_samples(number, *every)
        if order is not None:
            return order, []
        phase, module = _PLACES["samples' values"]
        row = list(every[0][index].samples).index(found.name)
        element = f"sample {found.name}, row {row} of the batch,"
        place = Location(number, phase, index, module, element=element, samples=[int(found.name)])
        return place, [((BATCH, index, 0), (BATCH, index, 0))]
    one, other = (step.micro_batches[str(index)] for step in (a, b))
    module, operation, value, keys = _within_pass(found.stage, index, one, other, found.calls)
    samples = _indices(one)
    return Location(number, found.stage, index, module, operation, value, samples=samples), keys


def _indices(trace: MicroTrace) -> list[int]:
    return list(map(int, trace.samples))


def _order_of_samples(
    number: int, a: Sequence[MicroTrace], b: Sequence[MicroTrace]
) -> Location | None:
    """Compare the samples of all micro-batches: they are known before the step begins."""
    phase, module = _PLACES["samples"]
    found = partial(Location, number, phase, module=module)
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        here = partial(found, micro_batch=index, samples=_indices(one))
        sizes = [f"{len(each.samples)} samples" for each in (one, other)]
        if sizes[0] != sizes[1]:
            return here(element="size of the micro-batch", a=sizes[0], b=sizes[1])
        for at, (sample, instead) in enumerate(zip(one.samples, other.samples, strict=True)):
            if sample != instead:
                return here(element=f"sample at position {at}", a=sample, b=instead)
    if len(a) != len(b):
        return found(element="number of micro-batches", a=str(len(a)), b=str(len(b)))
    return None


def _within_pass(
    stage: str, index: int, a: MicroTrace, b: MicroTrace, calls: Calls
) -> tuple[str, str, str, Keys]:
    """Return module, operation and value of the first difference of a pass, and the keys of its tensors.

    Args:
        stage: FORWARD, LOSS or BACKWARD.
        calls: In the forward pass, the call of either run whose result differs.
    """

    def until_first(trace: MicroTrace, other: MicroTrace, call: int | None) -> list[Operation]:
        """Return the operations up to the first whose result the other run has not; none if there is none."""
        others = values_of(other)
        for number, each in enumerate(trace.operations):
            is_meant = each.call == call if stage == FORWARD else each.phase == stage
            if is_meant and each.output not in others:
                return trace.operations[: number + 1]
        return []

    one, other = calls
    ran = until_first(a, b, one), until_first(b, a, other)
    operation = _both(*(each[-1].title if each else "" for each in ran))
    keys: Keys = []
    codes = [[each.name for each in operations] for operations in ran]
    if codes[0] and codes[0] == codes[1]:  # the same place in the same code
        result: Key = (OPERATION, index, len(codes[0]) - 1)
        keys = [(result, result)]
    if stage == FORWARD:
        if one is not None and other is not None:
            output: tuple[Key, Key] = ((CALL, index, one), (CALL, index, other))
            # A module that contains others may compute much more between this operation and its output.
            is_outer = any(call.parent == one for call in a.calls)
            keys = [*keys, output] if is_outer else [output, *keys]
        return _both(_title(a, one), _title(b, other)), operation, "output", keys
    if stage == LOSS:
        return "loss", operation, "result", [*keys, ((LOSS, index, 0), (LOSS, index, 0))]
    names = unequal(a.gradients, b.gradients)
    assert names is not None
    titles = [
        _title(trace, operations[-1].call if operations else None)
        for trace, operations in zip((a, b), ran, strict=True)
    ]
    module = _both(*titles) or ("loss" if operation else module_of(names[0]))
    value = "result" if keys else f"gradient of {names[0]}"
    keys.append(((GRADIENT, index, names[0]), (GRADIENT, index, names[1])))
    return module, operation, value, keys


def _title(trace: MicroTrace, call: int | None) -> str:
    return "" if call is None else f"{trace.calls[call].name or MODEL} ({trace.calls[call].kind})"


def _both(a: str, b: str) -> str:
    """Describe what two runs have: once if it is the same, or only one has it."""
    if a == b or not b:
        return a
    return f"{a} in a, {b} in b" if a else b
