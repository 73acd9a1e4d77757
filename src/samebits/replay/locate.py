"""The first difference between two runs: within a step's traces, and in places that no trace shows."""

from collections.abc import Callable, Sequence
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
    BACKWARD,
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


@dataclass(frozen=True)
class FirstDifference:
    """Where two steps differ first."""

    phase: str  #: Part of the step, such as "forward".
    micro_batch: int | None = None  #: The micro-batch; None for what follows after all of them.
    module: str = ""  #: The module, with its class; of both runs where these differ.
    operation: str = ""  #: torch's operation, or the autograd function in the backward pass.
    what: str = ""  #: The value that differs, such as "output".
    #: Pairs of keys of tensors to compare element by element, best first.
    keys: list[tuple[Key, Key]] = field(default_factory=list)
    a: str = ""  #: Value in the first run, if it is known without tensors.
    b: str = ""  #: Value in the second run.
    #: Samples of the micro-batch, of the first run.
    samples: list[int] = field(default_factory=list)


def locate(a: StepTrace, b: StepTrace) -> FirstDifference | None:
    """Return the first difference of one step of both runs before the update; None if gradients are equal."""
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
        key: tuple[Key, Key] = ((kind, 0, names[0]), (kind, 0, names[1]))
        return FirstDifference(
            phase, module=module_of(names[0]), what=f"gradient of {names[0]}", keys=[key]
        )
    index = found.micro_batch or 0
    if found.stage == SAMPLES:
        every = [list(step.micro_batches.values()) for step in (a, b)]
        place = _samples(*every) or _sample_values(index, found.name, every[0][index])
    else:
        one, other = (step.micro_batches[str(index)] for step in (a, b))
        place = {FORWARD: _forward, LOSS: _loss, BACKWARD: _backward}[found.stage](
            index, one, other, found.calls
        )
        place = replace(place, samples=_indices(one))
    return place


def _indices(trace: MicroTrace) -> list[int]:
    return list(map(int, trace.samples))


def _samples(a: Sequence[MicroTrace], b: Sequence[MicroTrace]) -> FirstDifference | None:
    """Compare the samples of all micro-batches: they are known before the step begins."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        sizes = [f"{len(each.samples)} samples" for each in (one, other)]
        found = partial(FirstDifference, "samples", index, samples=_indices(one))
        if sizes[0] != sizes[1]:
            return found(what="size of the micro-batch", a=sizes[0], b=sizes[1])
        for at, (sample, instead) in enumerate(zip(one.samples, other.samples, strict=True)):
            if sample != instead:
                return found(what=f"sample at position {at}", a=sample, b=instead)
    if len(a) != len(b):
        return FirstDifference(
            "samples", what="number of micro-batches", a=str(len(a)), b=str(len(b))
        )
    return None


def _sample_values(index: int, sample: str, a: MicroTrace) -> FirstDifference:
    key: Key = (BATCH, index, 0)
    what = f"sample {sample}, row {list(a.samples).index(sample)} of the batch,"
    return FirstDifference(
        "sample values", index, what=what, keys=[(key, key)], samples=[int(sample)]
    )


Calls = tuple[int | None, int | None]


def _forward(index: int, a: MicroTrace, b: MicroTrace, calls: Calls) -> FirstDifference:
    one, other = calls
    operations = _first_operations(
        a, b, lambda each: each.call == one, lambda each: each.call == other
    )
    outputs: list[tuple[Key, Key]] = []
    if one is not None and other is not None:
        outputs = [((CALL, index, one), (CALL, index, other))]
    # A module that contains others may compute much more between this operation and its output.
    is_outer = any(call.parent == one for call in a.calls)
    keys = [*operations.keys(index), *outputs] if is_outer else [*outputs, *operations.keys(index)]
    module = _both(_title(a, one), _title(b, other))
    return FirstDifference("forward", index, module, operations.name, "output", keys)


def _loss(index: int, a: MicroTrace, b: MicroTrace, _: Calls) -> FirstDifference:
    operations = _first_operations(
        a, b, lambda each: each.phase == LOSS, lambda each: each.phase == LOSS
    )
    keys: list[tuple[Key, Key]] = [*operations.keys(index), ((LOSS, index, 0), (LOSS, index, 0))]
    return FirstDifference("loss", index, "loss", operations.name, "result", keys)


def _backward(index: int, a: MicroTrace, b: MicroTrace, _: Calls) -> FirstDifference:
    names = unequal(a.gradients, b.gradients)
    assert names is not None
    operations = _first_operations(
        a, b, lambda each: each.phase == BACKWARD, lambda each: each.phase == BACKWARD
    )
    calls = [None if each is None else each.call for each in (operations.a, operations.b)]
    module = _both(_title(a, calls[0]), _title(b, calls[1]))
    if not module:
        module = "loss" if operations.name else module_of(names[0])
    keys = operations.keys(index)
    what = "result" if keys else f"gradient of {names[0]}"
    gradient: tuple[Key, Key] = ((GRADIENT, index, names[0]), (GRADIENT, index, names[1]))
    return FirstDifference("backward", index, module, operations.name, what, [*keys, gradient])


@dataclass(frozen=True)
class _Operations:
    """The first operation of each run whose result the other run has not; None if there is none."""

    numbers: tuple[int | None, int | None]
    a: Operation | None
    b: Operation | None
    is_same_code: bool

    @property
    def name(self) -> str:
        """The operations' names."""
        return _both(*("" if each is None else each.title for each in (self.a, self.b)))

    def keys(self, index: int) -> list[tuple[Key, Key]]:
        """Return the keys of their results in a micro-batch, if both have the same place in the same code."""
        one, other = self.numbers
        if one is None or other is None or not self.is_same_code:
            return []
        return [((OPERATION, index, one), (OPERATION, index, other))]


def _first_operations(
    a: MicroTrace,
    b: MicroTrace,
    is_meant_a: Callable[[Operation], bool],
    is_meant_b: Callable[[Operation], bool],
) -> _Operations:
    one = _first_operation(a, is_meant_a, values_of(b))
    other = _first_operation(b, is_meant_b, values_of(a))
    names = [
        [] if number is None else [each.name for each in trace.operations[: number + 1]]
        for trace, number in ((a, one), (b, other))
    ]
    return _Operations(
        (one, other),
        None if one is None else a.operations[one],
        None if other is None else b.operations[other],
        is_same_code=bool(names[0]) and names[0] == names[1],
    )


def _first_operation(
    trace: MicroTrace, is_meant: Callable[[Operation], bool], others: set[str]
) -> int | None:
    numbered = enumerate(trace.operations)
    return next(
        (number for number, each in numbered if is_meant(each) and each.output not in others), None
    )


def _title(trace: MicroTrace, call: int | None) -> str:
    return "" if call is None else f"{trace.calls[call].name or MODEL} ({trace.calls[call].kind})"


def _both(a: str, b: str) -> str:
    """Describe what two runs have: once if it is the same, or only one has it."""
    if a == b or not b:
        return a
    return f"{a} in a, {b} in b" if a else b
