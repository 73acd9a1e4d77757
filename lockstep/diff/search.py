"""The search for the first difference between two runs, by replaying both side by side.

    start        the newest point where both runs have equal states: a checkpoint of each, or the initial weights
    side by side step by step, until a record or a state differs: at most to the first step whose records differ
    trace        that step again, with digests of everything it computes          -> module and operation
    capture      that step again, keeping only the tensors that differ            -> element and values

States are compared after each step, since an update can differ a step before any record shows it: the momentum of the
first step shows in the loss of the third. If the two replays agree, the difference was not made by training: a file was
altered, or a run does not repeat its own record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lockstep.diff.folders import unequal_fields
from lockstep.diff.locate import FirstDifference, locate
from lockstep.diff.side import Side
from lockstep.diff.tensors import Element, first_element, first_tensor, largest_difference, module_of
from lockstep.diff.trace import Key, StepTrace
from lockstep.diff.tracer import trace_step
from lockstep.provenance.step_log import StepRecord
from lockstep.storage.checkpoint import AVERAGE

Sides = tuple[Side, Side]
Progress = Callable[[int, int], None]
# Fields of a record that name the place of a difference.
_PLACES = {
    "samples": ("samples", "(order of samples)"),
    "samples' values": ("sample values", "(data)"),
    "learning rate": ("learning rate", "(optimizer)"),
}


@dataclass(frozen=True)
class Location:
    """The first difference between two runs.

    Attributes:
        step: The step that differs, from 0; for a state, the number of steps done.
        phase: Part of the step, or "initial weights", "stored state", "not reproduced".
        micro_batch: The micro-batch.
        module: The module.
        operation: The operation.
        element: The value that differs, with the index of its first element.
        a: Value in the first run.
        b: Value in the second run.
        samples: Samples of the micro-batch.
        notes: What else was found, one line each.
        num_replays: How often a part of a run was replayed.
    """

    step: int
    phase: str
    micro_batch: int | None = None
    module: str = ""
    operation: str = ""
    element: str = ""
    a: str = ""
    b: str = ""
    samples: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_replays: int = 0


def search(a: Side, b: Side, step: int, report: Progress = lambda done, total: None) -> Location | None:
    """Find the first difference between two runs.

    Args:
        a: The first run.
        b: The second run.
        step: The last step to replay: the first one whose records differ, or the last one before a checkpoint differs.
        report: Called after each step that both runs have replayed, with the number of steps done and to do.

    Returns:
        The difference; None if both runs and both replays are equal up to that step.
    """
    sides = (a, b)
    found = _search(sides, step, report)
    return None if found is None else replace(found, num_replays=a.num_replays + b.num_replays)


def _search(sides: Sides, step: int, report: Progress) -> Location | None:
    a, b = sides
    if a.has_average != b.has_average:
        a.has_average = b.has_average = False  # the training itself may be equal
    newest = max(a.starts(step)[-1], b.starts(step)[-1])
    for side in sides:
        side.go_to(side.starts(step)[-1])
        side.advance(newest)
    limit = step + 1
    if a.state() != b.state():
        common = sorted(set(a.starts(step)) & set(b.starts(step)))
        equal = _newest_equal(sides, common)
        if equal is None:
            return _initial(sides)
        # The difference was made after that point, and before the next one.
        limit = next((each for each in common if each > equal), newest)
        for side in sides:
            side.go_to(equal)
    agrees, start = [True, True], a.step_number
    while a.step_number < limit:
        before = a.snapshot(), b.snapshot()
        records = a.step(), b.step()
        agrees = [agrees[at] and side.matches(records[at]) for at, side in enumerate(sides)]
        if records[0].to_bytes() != records[1].to_bytes() or a.state() != b.state():
            for side, snapshot in zip(sides, before, strict=True):
                side.restore(snapshot)
            return _within_step(sides, before, records, agrees)
        report(a.step_number - start, limit - start)
        if not all(agrees):
            return _not_reproduced(sides, agrees, records[0])
    return _altered(sides, limit)


def _newest_equal(sides: Sides, common: Sequence[int]) -> int | None:
    """Return the newest of the common starts at which both runs have equal states, by bisection; None: at none."""
    low, high = -1, len(common)
    while high - low > 1:
        middle = (low + high) // 2
        if _is_equal_at(sides, common[middle]):
            low = middle
        else:
            high = middle
    return None if low < 0 else common[low]


def _is_equal_at(sides: Sides, step: int) -> bool:
    a, b = sides
    if step and a.recorded.checkpoints[step] == b.recorded.checkpoints[step]:
        return True
    for side in sides:
        side.go_to(step)
    return a.state() == b.state()


def _initial(sides: Sides) -> Location:
    tensors = [side.tensors() for side in sides]
    found = first_tensor(*tensors)
    assert found is not None, "the states differ"
    name, element = found
    notes = []
    plans = [side.plan().micro_batches[0].indices.tolist() for side in sides]
    if plans[0] != plans[1]:
        notes.append(f"the first micro-batch has other samples too: {plans[0][:4]} / {plans[1][:4]} …")
    return Location(
        0,
        "initial weights",
        module=module_of(name),
        element=_element(name, element),
        a=element.a,
        b=element.b,
        notes=notes,
    )


def _within_step(
    sides: Sides, before: Sequence[object], records: tuple[StepRecord, StepRecord], agrees: Sequence[bool]
) -> Location:
    """Locate the difference within the next step of both runs."""
    number = records[0].step
    traces = trace_step(sides[0]), trace_step(sides[1])
    notes = [
        f"the replay of {side.name} differs from its own record, so its code, data, versions or hardware have changed"
        for side, is_as_recorded in zip(sides, agrees, strict=True)
        if not is_as_recorded
    ]
    if any(trace.record.to_bytes() != record.to_bytes() for trace, record in zip(traces, records, strict=True)):
        notes.append("the traced step has other bits than the replayed one, so that the place below is uncertain")
    place = locate(*traces)
    if place is None:
        return _update(sides, records, notes)
    element = _capture(sides, before, place)
    where = place.what
    if element is not None:
        where = f"{place.what} {element.index}"
    return Location(
        number, place.phase, place.micro_batch, place.module or _no_module(place.phase), place.operation, where,
        place.a if element is None else element.a, place.b if element is None else element.b, place.samples, notes,
    )  # fmt: skip


def _no_module(phase: str) -> str:
    return {"samples": "(order of samples)", "sample values": "(data)"}.get(phase, "")


def _capture(sides: Sides, before: Sequence[object], place: FirstDifference) -> Element | None:
    """Repeat the step, keep the tensors of a place, and return the first element that differs."""
    if not place.keys:
        return None
    traces: list[StepTrace] = []
    for at, (side, snapshot) in enumerate(zip(sides, before, strict=True)):
        side.restore(snapshot)  # type: ignore[arg-type]  # of this side
        keys: set[Key] = {pair[at] for pair in place.keys}
        traces.append(trace_step(side, keys))
    pairs = [(traces[0].kept.get(one, []), traces[1].kept.get(other, [])) for one, other in place.keys]
    found = [element for pair in pairs if (element := first_element(*pair)) is not None]
    return next((element for element in found if element.is_value), found[0] if found else None)


def _update(sides: Sides, records: tuple[StepRecord, StepRecord], notes: list[str]) -> Location:
    """Describe a difference that begins after the gradients: learning rate, buffers or update. Both steps are done."""
    a, b = records
    kinds = [type(side.job.optimizer).__name__ for side in sides]
    optimizer = kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} in a, {kinds[1]} in b"
    tensors = [side.tensors() for side in sides]
    buffers = {name for name, _ in sides[0].job.model.named_buffers()}
    first = first_tensor(*({name: each[name] for name in each if name in buffers} for each in tensors))
    if first is not None:
        name, element = first
        return Location(
            a.step,
            "buffers",
            module=module_of(name),
            element=_element(name, element),
            a=element.a,
            b=element.b,
            notes=notes,
        )
    if a.lr != b.lr:
        return Location(
            a.step, "learning rate", module="(optimizer)", operation=optimizer, element="learning rate", a=repr(a.lr),
            b=repr(b.lr), notes=notes,
        )  # fmt: skip
    found = first_tensor(*tensors)
    if found is None:
        fields = (
            f"outcome {a.outcome} / {b.outcome}, gradient norm {a.norm!r} / {b.norm!r}, loss {a.loss!r} / {b.loss!r}"
        )
        return Location(a.step, "sums over the step", element=fields, notes=notes)
    name, element = found
    phase = "moving average" if name.startswith(AVERAGE) else "update"
    return Location(
        a.step, phase, module=module_of(name.removeprefix(AVERAGE)), operation=optimizer,
        element=_element(name, element), a=element.a, b=element.b, notes=notes,
    )  # fmt: skip


def _not_reproduced(sides: Sides, agrees: Sequence[bool], record: StepRecord) -> Location:
    """Describe a step at which both replays agree, and the record of a run differs."""
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
    first = unequal_fields(recorded, record)[0]
    if first.name in _PLACES:
        phase, module = _PLACES[first.name]
        values = (first.a, first.b) if side.name == "a" else (first.b, first.a)
        return Location(step, phase, module=module, element=first.name, a=values[0], b=values[1], notes=notes)
    following = [each for each in sorted(side.recorded.checkpoints) if each > step]
    if len(wrong) == 2 or not following:
        return Location(step, "not reproduced", notes=notes)
    # A changed weight stays changed, so the largest difference in the next checkpoint may show where it was.
    side.advance(following[0])
    file, stored, replayed = next(side.stored(following[0]))
    largest = largest_difference(stored, replayed)
    if largest is None:
        return Location(step, "not reproduced", notes=notes)
    name, element = largest
    notes.append(f"{side.name}/{file} differs from the replay in this module most; both values are of {side.name}:")
    notes.append(f"{element.a} stored, {element.b} replayed")
    return Location(step, "not reproduced", module=module_of(name), element=_element(name, element), notes=notes)


def _altered(sides: Sides, step: int) -> Location | None:
    """Compare the stored states after a number of steps with the replays, which agree."""
    for side in sides:
        for file, stored, replayed in side.stored(step):
            found = first_tensor(stored, replayed)
            if found is None:
                continue
            name, element = found
            # The other run has the replayed value.
            values = (element.a, element.b) if side.name == "a" else (element.b, element.a)
            return Location(
                step,
                "stored state",
                module=module_of(name.removeprefix(AVERAGE)),
                element=_element(name, element),
                a=values[0],
                b=values[1],
                notes=[f"{side.name}/{file} is not what the steps of {side.name} lead to: it was altered"],
            )
    averages = [side.job.average for side in sides]
    if (averages[0] is None) != (averages[1] is None):
        name = next(iter(sides[0].job.state()))
        kinds = ["none" if average is None else "an average of each weight" for average in averages]
        return Location(0, "moving average", module=module_of(name), element="average", a=kinds[0], b=kinds[1])
    return None


def _element(name: str, element: Element) -> str:
    return f"{name} {element.index}".rstrip()
