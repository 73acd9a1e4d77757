"""The place of the first difference between two runs, and those places that no trace of a step shows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from samebits.bits import Element
from samebits.diff.folders import unequal_fields
from samebits.diff.side import Side
from samebits.diff.tensors import first_tensor, largest_difference, module_of
from samebits.provenance.step_log import StepRecord
from samebits.storage.checkpoint import AVERAGE

Sides = tuple[Side, Side]
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
        notes.append(f"the first micro-batch has other samples too: {plans[0][:4]} / {plans[1][:4]} …")
    return _of_tensor(0, "initial weights", found, notes)


def describe_update(sides: Sides, records: tuple[StepRecord, StepRecord], notes: list[str]) -> Location:
    """Describe a difference that begins after the gradients: learning rate, buffers or update.

    Args:
        sides, records, notes: Both runs and their records after the step, and notes for the description.
    """
    a, b = records
    kinds = [type(side.job.optimizer).__name__ for side in sides]
    optimizer = kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} in a, {kinds[1]} in b"
    tensors = [side.tensors() for side in sides]
    buffers = {name for name, _ in sides[0].job.model.named_buffers()}
    first = first_tensor(*({name: each[name] for name in each if name in buffers} for each in tensors))
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
            f"outcome {a.outcome} / {b.outcome}, gradient norm {a.norm!r} / {b.norm!r}, loss {a.loss!r} / {b.loss!r}"
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
    element = largest[1]
    notes.append(f"{side.name}/{file} differs from the replay in this module most; both values are of {side.name}:")
    notes.append(f"{element.a} stored, {element.b} replayed")
    return replace(_of_tensor(step, "not reproduced", largest, notes), a="", b="")


def find_altered(sides: Sides, step: int) -> Location | None:
    """Compare the stored states after a number of steps with the replays, which agree."""
    for side in sides:
        for file, stored, replayed in side.stored(step):
            found = first_tensor(stored, replayed)
            if found is None:
                continue
            notes = [f"{side.name}/{file} is not what the steps of {side.name} lead to: it was altered"]
            place = _of_tensor(step, "stored state", found, notes)
            # The other run has the replayed value.
            return place if side.name == "a" else replace(place, a=place.b, b=place.a)
    averages = [side.job.average for side in sides]
    if (averages[0] is None) != (averages[1] is None):
        name = next(iter(sides[0].job.state()))
        kinds = ["none" if average is None else "an average of each weight" for average in averages]
        return Location(0, "moving average", module=module_of(name), element="average", a=kinds[0], b=kinds[1])
    return None


def _of_tensor(step: int, phase: str, found: tuple[str, Element], notes: list[str]) -> Location:
    name, element = found
    module = module_of(name.removeprefix(AVERAGE))
    where = f"{name} {element.index}".rstrip()
    return Location(step, phase, module=module, element=where, a=element.a, b=element.b, notes=notes)
