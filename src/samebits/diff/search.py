"""The search for the first difference between two runs, by replaying both side by side.

    start        the newest point where both runs have equal states: a checkpoint of each, or the initial weights
    side by side step by step, until a record or a state differs: at most to the first step whose records differ
    trace        that step again, with digests of everything it computes          -> module and operation
    capture      that step again, keeping only the tensors that differ            -> element and values

States are compared after each step, since an update can differ a step before any record shows it: the momentum of the
first step shows in the loss of the third. If the two replays agree, the difference was not made by training: a file was
altered, or a run does not repeat its own record.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from samebits.bits import Element, first_element
from samebits.diff.locate import FirstDifference, locate
from samebits.diff.location import (
    Location,
    Sides,
    describe_initial,
    describe_not_reproduced,
    describe_update,
    find_altered,
)
from samebits.diff.side import Side
from samebits.diff.trace import Key, StepTrace
from samebits.diff.tracer import trace_step
from samebits.provenance.step_log import StepRecord

Progress = Callable[[int, int], None]


def search(a: Side, b: Side, step: int, report: Progress = lambda done, total: None) -> Location | None:
    """Find the first difference between two runs; None if runs and replays are equal up to that step.

    Args:
        step: The last step to replay: the first one whose records differ, or the last one before a checkpoint differs.
        report: Called after each step that both runs have replayed, with the number of steps done and to do.
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
            return describe_initial(sides)
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
            return describe_not_reproduced(sides, agrees, records[0])
    return find_altered(sides, limit)


def _newest_equal(sides: Sides, common: Sequence[int]) -> int | None:
    """Return the newest of the common starts at which both runs have equal states, by bisection; None: at none."""
    low, high = -1, len(common)
    while high - low > 1:
        middle = (low + high) // 2
        step = common[middle]
        is_equal = step and sides[0].recorded.checkpoints[step] == sides[1].recorded.checkpoints[step]
        if not is_equal:
            for side in sides:
                side.go_to(step)
            is_equal = sides[0].state() == sides[1].state()
        if is_equal:
            low = middle
        else:
            high = middle
    return None if low < 0 else common[low]


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
        return describe_update(sides, records, notes)
    element = _capture(sides, before, place)
    where = place.what if element is None else f"{place.what} {element.index}"
    module = place.module or {"samples": "(order of samples)", "sample values": "(data)"}.get(place.phase, "")
    return Location(
        number, place.phase, place.micro_batch, module, place.operation, where,
        place.a if element is None else element.a, place.b if element is None else element.b, place.samples, notes,
    )  # fmt: skip


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
