"""What differs between two runs: their folders, the first step, and the place within it."""

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from samebits.bits import Element, first_element
from samebits.errors import CheckpointError, SamebitsError
from samebits.provenance.record import StepRecord
from samebits.replay.compare import Change
from samebits.replay.folders import FolderDifference, compare_folders, read_run
from samebits.replay.locate import (
    Keys,
    Location,
    Sides,
    describe_initial,
    describe_not_reproduced,
    describe_update,
    find_altered,
    locate,
)
from samebits.replay.stepper import ReplayedRun
from samebits.report.console import Console
from samebits.storage.run_folder import check_run_path

# The search for the first difference between two runs, by replaying both side by side.
#
#     start        the newest point where both runs have equal states: a checkpoint of each, or the initial weights
#     side by side step by step, until a record or a state differs: at most to the first step whose records differ
#     trace        that step again, with digests of everything it computes          -> module and operation
#     capture      that step again, keeping only the tensors that differ            -> element and values
#
# States are compared after each step, since an update can differ a step before any record shows it: the momentum of
# the first step shows in the loss of the third. If the two replays agree, the difference was not made by training: a
# file was altered, or a run does not repeat its own record.


def search(sides: Sides, step: int, report: Callable[[int, int], None]) -> Location | None:
    """Find the first difference between two runs; None if runs and replays are equal up to that step.

    Args:
        step: The last step to replay: the first one whose records differ, or the last one before a checkpoint differs.
        report: Called after each step that both runs have replayed, with the number of steps done and to do.
    """
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
    agrees = [True, True]
    start = a.step_number
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
    a, b = sides

    def is_different(step: int) -> bool:
        if step and a.recorded.checkpoints[step] == b.recorded.checkpoints[step]:
            return False
        for side in sides:
            side.go_to(step)
        return a.state() != b.state()

    num_equal = bisect_right(common, False, key=is_different)
    return common[num_equal - 1] if num_equal else None


def _within_step(
    sides: Sides,
    before: Sequence[object],
    records: tuple[StepRecord, StepRecord],
    agrees: Sequence[bool],
) -> Location:
    """Locate the difference within the next step of both runs."""
    number = records[0].step
    traced = sides[0].trace(), sides[1].trace()
    notes = [
        f"the replay of {side.name} differs from its own record, so its code, data, versions or hardware have changed"
        for side, is_as_recorded in zip(sides, agrees, strict=True)
        if not is_as_recorded
    ]
    if any(
        again.to_bytes() != record.to_bytes()
        for (again, _), record in zip(traced, records, strict=True)
    ):
        notes.append(
            "the traced step has other bits than the replayed one, so that the place below is uncertain"
        )
    found = locate(number, traced[0][1], traced[1][1])
    if found is None:
        return describe_update(sides, records, notes)
    place, keys = found
    place = replace(place, notes=notes)
    element = _capture(sides, before, keys)
    if element is None:
        return place
    where = f"{place.element} {element.index}"
    return replace(place, element=where, a=element.a, b=element.b)


def _capture(sides: Sides, before: Sequence[object], keys: Keys) -> Element | None:
    """Repeat the step, keep the tensors with some keys, and return the first element that differs."""
    if not keys:
        return None
    kept = []
    for at, (side, snapshot) in enumerate(zip(sides, before, strict=True)):
        side.restore(snapshot)  # type: ignore[arg-type]  # of this side
        kept.append(side.trace([pair[at] for pair in keys].__contains__)[1].kept)
    pairs = [(kept[0].get(one, []), kept[1].get(other, [])) for one, other in keys]
    found = [element for pair in pairs if (element := first_element(*pair)) is not None]
    return next((element for element in found if element.is_value), found[0] if found else None)


_SHOWN = 8  # differences of a kind
_NUM_SAMPLES = 16
# Settings that can cause a difference of a phase, by the beginning of their names.
_CAUSES = {
    "initial weights": ("seed", "model."),
    "samples": ("seed", "global_batch", "micro_batch", "data."),
    "sample values": ("data.", "seed"),
    "forward": ("model.", "precision", "seed", "num_threads", "channels_last", "batch_norm"),
    "loss": ("model.", "data.", "precision", "num_threads"),
    "backward": ("model.", "precision", "num_threads"),
    "clipping of the gradient": ("optim.",),
    "learning rate": ("optim.", "epochs", "global_batch"),
    "update": ("optim.",),
    "moving average": ("optim.",),
    "buffers": ("model.", "batch_norm"),
}


@dataclass(frozen=True)
class RunDifference:
    """The result of a comparison of two runs."""

    a: Path  #: The first run folder.
    b: Path  #: The second run folder.
    folders: FolderDifference  #: The differences between their files.
    #: The first difference within a step; None if there is none, or if it was not searched.
    location: Location | None = None
    problem: str = ""  #: Why it could not be searched; empty otherwise.

    @property
    def is_equal(self) -> bool:
        """Whether both runs did the same training, and no file of them was altered."""
        return self.folders.is_equal

    @property
    def likely(self) -> list[Change]:
        """The differences that may be the cause, most likely first."""
        folders = self.folders
        settings = folders.settings
        if self.location is not None:
            begins = _CAUSES.get(self.location.phase, ())
            settings = [each for each in settings if each.name.startswith(begins)] or settings
        return next(
            (found for found in (settings, folders.code, folders.data, folders.versions) if found),
            [],
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the result as plain JSON, for other programs."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "is_equal": self.is_equal,
            **asdict(self.folders),
            "location": None if self.location is None else asdict(self.location),
            "likely": [asdict(each) for each in self.likely],
            "problem": self.problem,
        }


def diff_runs(
    a: Path,
    b: Path,
    overrides: Sequence[str] = (),
    recipes: tuple[Path | None, Path | None] = (None, None),
    *,
    is_replayed: bool = True,
) -> RunDifference:
    """Compare two runs. Nothing is written into their folders.

    Args:
        overrides: Settings of both replays that do not change the result, such as data.root.
        recipes: Recipe files to replay the runs with; None: those that the runs name.

    Raises:
        CheckpointError: The runs have nothing that can be compared, or a folder is not a run folder.
    """
    for run in (a, b):
        check_run_path(run)
    recorded = read_run(a), read_run(b)
    folders = compare_folders(*recorded)
    has_common = not recorded[0].checkpoints.keys().isdisjoint(recorded[1].checkpoints)
    if folders.num_compared == 0 and folders.weights is None and not has_common:
        raise CheckpointError(
            "the runs have no steps, checkpoints or final weights in common, so there is nothing to compare",
            given="\n".join(folders.notes),
            fix="Train both runs with record.steps=true.",
        )
    # The last step that a search has to replay; None if no step, checkpoint or weight differs.
    step = min(folders.num_steps) - 1 if folders.weights else None
    if folders.step is not None:
        # A checkpoint before it cannot differ unless it was altered, or the update before it differs.
        step = folders.step.step
    elif folders.checkpoint is not None:
        step = folders.checkpoint - 1
    found = RunDifference(a, b, folders)
    if step is None or not is_replayed:
        return found
    console = Console(sys.stderr)
    try:
        with ExitStack() as stack:
            stack.callback(console.close)
            one, other = (
                ReplayedRun(name, run, overrides, recipe, stack)
                for name, run, recipe in zip("ab", recorded, recipes, strict=True)
            )
            place = search((one, other), step, partial(console.share_done, "replaying"))
            if place is not None:
                place = replace(place, num_replays=one.num_replays + other.num_replays)
            return RunDifference(a, b, folders, place)
    except SamebitsError as error:
        return RunDifference(a, b, folders, problem=error.line)


def lines(found: RunDifference) -> list[str]:
    """Return the lines that report a comparison to the user."""
    folders = found.folders
    likely = [
        f"{'likely' if number == 0 else '':<10} {each.name}: {each.a} in a, {each.b} in b"
        for number, each in enumerate(found.likely[:3])
    ]
    return [
        *_block("settings", folders.settings),
        *(_block("free", folders.free_settings, "no result") if folders.free_settings else []),
        *_block("code", folders.code),
        *_block("data", folders.data),
        *_block("versions", folders.versions),
        *_steps(folders),
        *(_block("metrics", folders.evaluations) if folders.evaluations else []),
        *([] if found.location is None else _place(found.location)),
        *([] if found.is_equal else likely),
        *(f"altered    {text}" for text in folders.altered[:_SHOWN]),
        *(
            [f"altered    {len(folders.altered) - _SHOWN} more"]
            if len(folders.altered) > _SHOWN
            else []
        ),
        *([f"note       the step was not replayed: {found.problem}"] if found.problem else []),
        *(f"note       {note}" for note in folders.notes),
        f"result     {'equal: both runs did the same training' if found.is_equal else 'different'}",
    ]


def _block(title: str, changes: Sequence[Change], suffix: str = "") -> list[str]:
    if not changes:
        return [f"{title:<10} equal"]
    texts = [f"{each.name}: {each.a} in a, {each.b} in b" for each in changes[:_SHOWN]]
    texts += [f"{len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
    head = f"{len(changes)} differ" + (", which change no result" if suffix else "")
    return [f"{title:<10} {head}", *(f"           {text}" for text in texts)]


def _steps(folders: FolderDifference) -> list[str]:
    a, b = folders.num_steps
    lengths = f"{a:,}" if a == b else f"{a:,} in a, {b:,} in b"
    if folders.step is None:
        found = [
            f"steps      {folders.num_compared:,} compared, all equal; the runs have {lengths}"
        ]
    else:
        first = folders.step.fields[0]
        values = "" if first.name.startswith("samples") else f" {first.a} in a, {first.b} in b"
        found = [f"steps      first difference: step {folders.step.step:,}, {first.name}{values}"]
        if len(folders.step.fields) > 1:
            found.append(
                f"           then {', '.join(each.name for each in folders.step.fields[1:])}"
            )
    if folders.checkpoint is not None:
        found.append(f"states     first difference: checkpoint after step {folders.checkpoint:,}")
    if folders.weights is not None:
        found.append(f"weights    {'different' if folders.weights else 'equal'}")
    return found


def _place(place: Location) -> list[str]:
    where = [f"step {place.step:,}", place.phase]
    where += [f"micro-batch {place.micro_batch}"] if place.micro_batch is not None else []
    where += [f"module {place.module}"] if place.module else []
    found = [f"begins     {', '.join(where)}"]
    if place.operation:
        found.append(f"           operation {place.operation}")
    if place.a or place.b:
        found.append(f"           {place.element}: {place.a} in a, {place.b} in b")
    elif place.element:
        found.append(f"           {place.element}")
    if place.samples:
        more = (
            f" and {len(place.samples) - _NUM_SAMPLES} more"
            if len(place.samples) > _NUM_SAMPLES
            else ""
        )
        found.append(
            f"           samples {', '.join(map(str, place.samples[:_NUM_SAMPLES]))}{more}"
        )
    found += [f"           {note}" for note in place.notes]
    return [*found, f"           found with {place.num_replays} replays"]
