"""Replay of segments of a run on the ranks of a world, and the comparison of each step with the run's record.

    for each segment
      restore      initial weights from the seed, or the checkpoint at its start
      step         run_step as in training -> a record -> compared with `steps.bin` on rank 0
                   evaluation where training had one -> metrics compared
      end          weights and optimizer state compared with the next checkpoint, or the final weights

Nothing is written into the run folder. The first difference of a segment ends it. Only rank 0 compares. It sends the
result to the others in the flag that is reduced with the next step's gradients, as a stop of training is.
"""

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from samebits.bench.bench import advance, joined
from samebits.cluster import collectives
from samebits.cluster.env import RankAssignment
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.engine.build import FILE_NAME as DATASET_INFO_FILE
from samebits.engine.build import WEIGHTS as INITIAL_WEIGHTS
from samebits.engine.build import (
    build_from,
    find_dataset_info,
    init_weights,
    initial_weights,
    make_job,
)
from samebits.engine.checkpoints import pack_job, restore_step
from samebits.engine.evaluate import validate
from samebits.engine.job import Job
from samebits.engine.output.recorder import digest_content, record_of, sample_ids
from samebits.engine.progress import StepFlags
from samebits.errors import CheckpointError, ConfigError, SamebitsError
from samebits.inference.hub import FILE_LISTS, compare_network, without_folders
from samebits.inference.trained_model import TrainedModel
from samebits.provenance.fingerprint import Named
from samebits.provenance.identity import DATASET_INFO, identity
from samebits.provenance.record import NO_DIGEST, STEPS_FILE, StepLog, StepRecord, read_steps
from samebits.recipes.catalog import RecipeSpec
from samebits.replay.compare import Tensors, changed_fields, first_tensor
from samebits.replay.record_files import Evaluations, compare_monitor, finding
from samebits.report.console import Console
from samebits.storage import checkpoint
from samebits.storage.manifest import WEIGHTS
from samebits.storage.weights import file_limits, read, weights_sha256

# Which steps a verification replays: pure arithmetic, equal for everyone who has the root.
#
# A run is cut into segments at its starting points: step 0 and the checkpoints that were kept.
#
#     step      0          100         200         300       345
#     segment   |----------|-----------|-----------|---------|
#               replayed from the seed; the others from the checkpoint at their start
#
# A segment is replayed whole or not at all: its start is a checkpoint, and its end is the next one, so equal steps
# and equal weights there show that nothing between was changed. A change within one segment shows in no other, since
# the next one starts from the changed checkpoint.


@dataclass(frozen=True, order=True)
class Segment:
    """The steps [start, stop) of a run, replayed from the run's state before `start`."""

    start: int  #: First step: 0, or the step of a checkpoint.
    stop: int  #: The step after the last one.

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return self.stop - self.start


def cut(starts: Iterable[int], num_steps: int) -> list[Segment]:
    """Cut a run at its starting points. `starts`: steps of the checkpoints that were kept; step 0 is always a start."""
    bounds = sorted({0, *(step for step in starts if 0 < step < num_steps), num_steps})
    return [Segment(start, stop) for start, stop in pairwise(bounds)]


def choose(segments: Sequence[Segment], share: float, seed: str) -> list[Segment]:
    """Choose the last segment, and others at random until these cover a share of all steps.

    The published weights are those at the end, so they are always the result of a replay.

    The order is that of SHA-256(seed, start), so everyone who knows the seed chooses the same ones, and the run's
    publisher, whose root is the seed, cannot choose them freely.

    Args:
        share: Fraction of the steps to cover, above 0.
        seed: The root, with the verifier's own number if there is one.

    Returns:
        The chosen segments, by step.
    """
    last = max(segments)
    others = [segment for segment in segments if segment != last]
    total = sum(segment.num_steps for segment in others)
    covered = 0
    chosen = [last]
    for segment in sorted(
        others, key=lambda each: hashlib.sha256(f"{seed} {each.start}".encode()).digest()
    ):
        if covered >= share * total:
            break
        chosen.append(segment)
        covered += segment.num_steps
    return sorted(chosen)


def covering(segments: Sequence[Segment], first: int, stop: int) -> list[Segment]:
    """Return the segments that have steps of [first, stop), each from its start; the last one ends at `stop`.

    Args:
        stop: The step after the last one to cover.
    """
    return [
        Segment(segment.start, min(segment.stop, stop))
        for segment in segments
        if segment.start < stop and segment.stop > first
    ]


def escape_probability(num_segments: int, num_replayed: int, num_changed: int) -> float:
    """Return the probability that changes in some segments escape a random choice of segments."""
    # Without factorials: they would have millions of digits for as many segments.
    num_left = num_segments - num_replayed
    return prod(
        max(0, num_left - each) / (num_segments - each)
        for each in range(min(num_changed, num_segments))
    )


def describe(segments: Iterable[Segment], limit: int = 5) -> str:
    """Describe segments as ranges of steps, neighbors joined: "steps 0-99, 300-399 and 4 more".

    Args:
        segments: The segments, by step.
    """
    ranges: list[Segment] = []
    for segment in segments:
        if ranges and ranges[-1].stop == segment.start:
            ranges[-1] = Segment(ranges[-1].start, segment.stop)
        else:
            ranges.append(segment)
    named = ", ".join(f"{each.start:,}-{each.stop - 1:,}" for each in ranges[:limit])
    return f"steps {named}" + (
        f" and {len(ranges) - limit} more ranges" if len(ranges) > limit else ""
    )


# Comparison of a replay with the record: of a step's values, of metrics, and of tensors, each by its bits.


@dataclass(frozen=True)
class Difference:
    """The first difference of a segment."""

    step: int  #: The step, from 0; for weights and metrics, the number of steps done.
    name: str  #: What differs: loss, gradient norm, learning rate, samples, content, outcome, a metric, or a tensor.
    recorded: str  #: The value in the run's record.
    replayed: str  #: The value of the replay.


def compare_metrics(
    step: int, recorded: Mapping[str, float | None], replayed: Mapping[str, float]
) -> Difference | None:
    """Return the first metric that differs.

    Args:
        recorded: Metrics by name; None for a value that is not finite, as in `metrics.jsonl`.
    """
    # JSON has no NaN and no infinity, so the record has None for them.
    now = {name: value if math.isfinite(value) else None for name, value in replayed.items()}
    for name in sorted(recorded.keys() | now.keys()):
        if recorded.get(name) != now.get(name):
            return Difference(step, f"metric {name}", repr(recorded.get(name)), repr(now.get(name)))
    return None


def compare_step(recorded: StepRecord | None, replayed: StepRecord) -> Difference | None:
    """Return the first value of a step that differs; None if all are equal, or nothing is recorded."""
    changes = changed_fields(recorded, replayed)
    return Difference(replayed.step, *astuple(changes[0])) if changes else None


def compare_tensors(step: int, recorded: Tensors, replayed: Tensors) -> Difference | None:
    """Return the first tensor, in the order of the replay's names, that differs in a bit.

    Args:
        recorded: Tensors of any shape by name, on the CPU.
        replayed: Tensors of any shape by name.
    """
    if missing := recorded.keys() ^ replayed.keys():
        name = min(missing)
        kinds = ["present" if name in each else "none" for each in (recorded, replayed)]
        return Difference(step, f"tensor {name}", *kinds)
    found = first_tensor({name: recorded[name] for name in replayed}, replayed)
    if found is None:
        return None
    name, element = found
    where = element.index if element.is_value else ""
    return Difference(step, f"tensor {name}{where}", element.a, element.b)


# Replay of one segment after another on a job, compared step by step with the run's record.


@dataclass(frozen=True)
class Plan:
    """What to replay; equal on all ranks."""

    run: Path  #: The run folder.
    #: Settings that differ from the run's and do not change the result, such as data.root.
    overrides: tuple[str, ...]
    segments: tuple[Segment, ...]  #: The segments, by step.
    num_steps: int  #: Number of steps that the run has done.
    #: The values of eval_batch that the run had: the last digits of a loss follow from it.
    eval_batches: tuple[int, ...]
    from_scratch: bool = False  #: Replay from step 0 to the end without the run's checkpoints.
    uses_log: bool = (
        True  #: Whether to compare each step with `steps.bin`, not only the weights at the end.
    )
    has_content: bool = False  #: Whether the log has digests of the samples' values.
    #: Step -> metrics of the run's evaluations.
    evaluations: Evaluations = field(default_factory=dict)
    weights_sha256: str = ""  #: Hash of the final weights; empty if the run is not complete.
    dataset_info_sha256: str = (
        ""  #: Digest of what the recipe read from its data; empty if it was not recorded.
    )


@dataclass
class Replay:
    """The result of a replay."""

    #: (start, stop) of each segment that was replayed without a difference.
    replayed: list[tuple[int, int]] = field(default_factory=list)
    #: The first difference of each other segment, and what the run states wrongly as a whole.
    differences: list[Difference] = field(default_factory=list)
    #: Files of the run that cannot be read or used, one line each.
    mismatches: list[str] = field(default_factory=list)
    #: What could not be replayed for that reason, one line each.
    notes: list[str] = field(default_factory=list)
    #: The replay's environment: versions, processor and kernels.
    environment: Named = field(default_factory=dict)
    code: Named = field(default_factory=dict)  #: Digests of the replay's code.
    data: Named = field(default_factory=dict)  #: Digests of the replay's samples.
    seconds: float = 0.0  #: Time of restoring, replaying and comparing, without the start of the processes, in seconds.


class Replayer:
    """Replays one segment after another.

    Args:
        job: The run, with the state before the first segment.
        log: The run's record of steps, on rank 0.
    """

    def __init__(self, plan: Plan, job: Job, log: StepLog) -> None:
        self._plan = plan
        self._job = job
        self._log = log
        self._done = 0
        self._total = sum(segment.num_steps for segment in plan.segments)
        self.damaged: set[int] = set()  #: Steps whose checkpoint cannot be used.
        #: Files of the run that cannot be read or used, one line each.
        self.mismatches: list[str] = []
        self.console = Console(sys.stderr)  #: Shows the progress.

    def replay(self, segment: Segment) -> Difference | None:
        """Replay a segment from the job's current state; return the first difference, on every rank."""
        job = self._job
        loader, steps = job.open_loader(segment.stop)
        if self._plan.has_content:
            loader.digests = []
        ids = sample_ids(job.order, segment.start, segment.stop)
        difference: Difference | None = None

        def has_difference() -> StepFlags:
            return StepFlags(0) if difference is None else StepFlags.STOP

        try:
            for step in steps:
                result = advance(job, step, loader, has_difference)
                if (
                    result.flags
                ):  # the step before differed, and this step's flags have informed all ranks
                    break
                content = digest_content(job) if self._plan.has_content else NO_DIGEST
                if job.world.is_main:
                    difference = compare_step(
                        self._log.get(step.number), record_of(step, result, next(ids), content)
                    )
                    self._done += 1
                    self.console.share_done("replaying", self._done, self._total)
                # Not only where the settings have one: eval_every is not part of the root.
                if (recorded := self._plan.evaluations.get(job.progress.step)) is not None:
                    of_metrics = self._compare_metrics(recorded)
                    difference = difference or of_metrics
        finally:
            loader.close()
        # After the last step there is no other one whose flags would inform the ranks.
        return self._on_rank0(lambda: difference) or self._compare_state(segment.stop)

    def _compare_metrics(self, recorded: Mapping[str, Any]) -> Difference | None:
        """Validate with each batch size that the run had, until the metrics are the recorded ones.

        A collective call: the plan is equal on all ranks, so all of them are here.
        """
        job = self._job
        found = list[Difference]()
        for size in self._plan.eval_batches:
            job.config = job.config.model_copy(update={"eval_batch": size})
            metrics, _, _ = validate(job)
            difference = compare_metrics(job.progress.step, recorded, metrics)
            if collectives.broadcast_object(job.world, difference is None):
                return None
            found += [difference] if difference is not None else []
        return found[0] if found else None

    def _compare_state(self, step: int) -> Difference | None:
        """Compare weights and optimizer state after a segment with the checkpoint and the final weights there."""
        job = self._job
        mine, replayed = pack_job(job)

        def checkpoint_differs() -> Difference | None:
            path = self._plan.run / "checkpoints" / checkpoint.name_of(step)
            if not path.is_dir():
                return None
            found = checkpoint.load_checkpoint(path, file_limits(job.model))
            if (difference := compare_tensors(step, checkpoint.pack(found)[0], mine)) is not None:
                return difference
            # Nothing else in `state.json` has an influence on the following steps.
            for name in ("loss_scale", "scale_age"):
                before = found.state.get(name)
                now = replayed["state"].get(name)
                if before != now:
                    return Difference(step, name.replace("_", " "), repr(before), repr(now))
            return None

        try:
            difference = self._on_rank0(checkpoint_differs)
        except CheckpointError as error:
            self.note_damage(step, error)
            difference = None
        if difference is not None or not self._plan.weights_sha256 or step != self._plan.num_steps:
            return difference
        final = job.final_weights()
        try:
            return self._on_rank0(
                lambda: compare_tensors(step, read(self._plan.run / WEIGHTS, job.model), final)
            )
        except CheckpointError as error:
            self.note_mismatch(error)
            return None

    def _on_rank0(self, compare: Callable[[], Difference | None]) -> Difference | None:
        """Compare on rank 0, and return or raise the result on every rank."""

        def compared() -> dict[str, Any] | None:
            difference = compare()
            return None if difference is None else asdict(difference)

        plain = collectives.run_on_rank0(self._job.world, compared)
        return None if plain is None else Difference(**plain)

    def note_damage(self, step: int, error: SamebitsError) -> None:
        """Note that the checkpoint of a step cannot be used."""
        self.damaged.add(step)
        self.note_mismatch(error, f"checkpoints/{checkpoint.name_of(step)}")

    def note_mismatch(self, error: SamebitsError, name: str = "") -> None:
        """Note that a file of the run cannot be read or used.

        Args:
            name: The file or folder, in case the reason does not begin with it.
        """
        text = finding(error, self._plan.run)
        text = text if name in text else f"{name}: {text}"
        if text not in self.mismatches:
            self.mismatches.append(text)


# Of a listing: a place, and rows for the head of a run.
_DESCRIBING = ("held_out_from", "warnings", "left_out", "padded")


def replay(plan: Plan, here: RankAssignment | None = None) -> dict[str, Any]:
    """Replay a plan as one process of a world, and return the verdict as plain values; complete on rank 0.

    Args:
        here: This process's rank; None: read from the environment.

    Raises:
        SamebitsError: The run cannot be replayed: recipe, data, settings or a checkpoint are missing or were altered.
    """
    model = TrainedModel(plan.run, plan.overrides)
    recipe, config = model.settings()
    with joined(config, here) as world:
        return asdict(replay_on(plan, model, recipe, config, world))


def replay_on(
    plan: Plan, model: TrainedModel, recipe: RecipeSpec, config: RunConfig, world: World
) -> Replay:
    """Replay a plan on a world that this process has joined. Returns the verdict; complete on rank 0."""
    try:
        kept = model.dataset_info(recipe, config, world)
    except CheckpointError as error:
        return Replay(
            mismatches=[finding(error, plan.run)],
            notes=["no step was replayed, since the dataset info is not the run's"],
        )
    # Ranks exchange plain values, so a named tuple arrives as a tuple.
    own = _Listing(
        *collectives.run_on_rank0(world, lambda: _list_again(plan, recipe, config, kept))
    )
    job = make_job(config, lambda: build_from(recipe, config, own.info, plan.run), world)
    job.identity = identity(config, own.info)
    log = read_steps(plan.run / STEPS_FILE) if plan.uses_log and world.is_main else StepLog()
    replayer = Replayer(plan, job, log)
    fingerprint = job.fingerprint
    verdict = Replay(
        environment=fingerprint.environment, code=fingerprint.code, data=fingerprint.data
    )
    verdict.mismatches += own.findings
    verdict.notes += own.notes
    if world.is_main:
        verdict.differences += _compare_whole(plan, job, replayer, own.sha256)
        verdict.notes += _not_stated(plan, job)
    started = time.perf_counter()
    for segment in plan.segments:
        start = segment.start
        stop = min(segment.stop, job.num_steps)
        if start >= stop:
            continue  # the record has more steps than the settings, which `_compare_whole` reports
        if start == 0:
            # Only possible on a fresh job: step 0 is the first of the sorted segments.
            init_weights(job)
        elif plan.from_scratch:
            if job.progress.step != start:
                break  # a difference has ended the replay before
        elif start in replayer.damaged and (verdict.replayed or [(0, 0)])[-1][1] == start:
            pass  # the replay has just come here, and so needs no checkpoint
        elif not _restore(job, recipe.load().config, plan.run, start, replayer):
            steps = describe([Segment(start, stop)])
            verdict.notes.append(
                f"{steps} were not replayed, since their start is damaged; --from-scratch needs no checkpoint"
            )
            continue
        difference = replayer.replay(Segment(start, stop))
        if difference is None:
            verdict.replayed.append((start, stop))
        else:
            verdict.differences.append(difference)
    verdict.mismatches += replayer.mismatches + compare_monitor(plan.run, job.parts.monitor)
    verdict.mismatches += compare_network(plan.run, config, job.parts)
    verdict.seconds = time.perf_counter() - started
    replayer.console.close()
    return verdict


def _restore(job: Job, stated: RunConfig, run: Path, step: int, replayer: Replayer) -> bool:
    """Restore the checkpoint of a step, and return whether it can be used. If not, that is a finding of every rank.

    Args:
        stated: The run's settings without those of the verifier, which a checkpoint is compared with.
    """
    used = job.config
    job.config = stated
    try:
        restore_step(job, run / "checkpoints", step)
    except (CheckpointError, ConfigError) as error:
        replayer.note_damage(step, error)
        return False
    finally:
        job.config = used
    return True


class _Listing(NamedTuple):
    """What a recipe reads from the data of the verifier, beside what the run has kept of it."""

    #: The run's dataset info, with the lists of files that `samebits push` leaves out.
    info: dict[str, Any]
    sha256: str  #: What its hash has to be; empty if that is not known.
    findings: list[str]  #: Where the verifier's data differs, one line each.
    notes: list[str]  #: What could not be compared.


def _list_again(
    plan: Plan, recipe: RecipeSpec, config: RunConfig, kept: dict[str, Any]
) -> _Listing:
    """List the verifier's own data, as a run does at its start, and compare it with the run's listing.

    The listing of the run came from its publisher, who could have given images other classes than their folder does.
    """
    now = find_dataset_info(recipe, config)
    notes = list[str]()
    info = {
        name: now.get(name, value) if name in FILE_LISTS and not value else value
        for name, value in kept.items()
    }
    stated = info.get(INITIAL_WEIGHTS)
    given = initial_weights(config)
    if isinstance(stated, dict):
        source = given or stated.get("source", "published ones")
        notes.append(
            f"the run starts from weights: {source}, sha256 {stated.get('sha256')}; who made them is not stated"
        )
    elif given is not None:
        notes.append(f"not stated: the SHA-256 of {given}, which the run starts from")
    if stated is not None and INITIAL_WEIGHTS not in now:
        notes.append(f"not compared: {given} does not exist")
    one = _compared(without_folders(info))
    other = _compared(without_folders(now))
    if stated is None or INITIAL_WEIGHTS not in now:  # named above
        one.pop(INITIAL_WEIGHTS, None)
        other.pop(INITIAL_WEIGHTS, None)
    first = (_first_difference(name, one.get(name), other.get(name)) for name in {**one, **other})
    findings = [f"{DATASET_INFO_FILE}: {text}" for text in first if text]
    sha256 = plan.dataset_info_sha256
    if (
        info != kept
        and sha256 not in ("", identity(config, info)[DATASET_INFO])
        and without_folders(now) != now
    ):
        notes.append(
            "not compared: the hash of the list of files, which has folders of the publisher"
        )
        sha256 = ""
    return _Listing(info, sha256, findings, notes)


def _compared(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two listings of one dataset have in common, wherever it lies: without paths, and texts with them."""
    found = {name: value for name, value in info.items() if name not in _DESCRIBING}
    if isinstance(skipped := found.get("skipped"), dict):
        found["skipped"] = list(skipped)
    if isinstance(sets := found.get("eval_sets"), dict):
        found["eval_sets"] = {
            name: each[1:] for name, each in sets.items() if isinstance(each, list)
        }
    return found


def _first_difference(name: str, stated: Any, found: Any) -> str:
    """Describe the first difference of two JSON values; empty if they are equal."""
    if stated == found:
        return ""
    if isinstance(stated, dict) and isinstance(found, dict):
        key = next(each for each in [*stated, *found] if stated.get(each) != found.get(each))
        return _first_difference(f"{name}.{key}", stated.get(key), found.get(key))
    if isinstance(stated, list) and isinstance(found, list):
        for index, (one, other) in enumerate(zip(stated, found, strict=False)):
            if one != other:
                return _first_difference(f"{name}[{index}]", one, other)
        return f"{name} has {len(stated):,} entries, and {len(found):,} in the data here"
    return f"{name} is {stated!r}, and {found!r} in the data here"


def _not_stated(plan: Plan, job: Job) -> list[str]:
    """Name the evaluations that the settings make, and that a complete run does not state."""
    interval = job.config.eval_interval
    per_epoch = job.order.steps_per_epoch
    due = (step for step in range(1, plan.num_steps + 1) if interval.is_due(step, per_epoch, 0.0))
    missing = [step for step in due if step not in plan.evaluations]
    if not missing or not plan.weights_sha256:
        return []
    several = "s, the first" if len(missing) > 1 else ""
    return [
        f"not stated: {len(missing):,} evaluation{several} after step {missing[0]:,}, "
        f"which eval_every={job.config.eval_every} makes"
    ]


def _compare_whole(plan: Plan, job: Job, replayer: Replayer, stated: str) -> list[Difference]:
    """Compare what the run states about itself as a whole: its length, its dataset info and its final weights.

    Args:
        stated: The hash of the dataset info; empty if it is not known.
    """
    found = []
    is_complete = bool(plan.weights_sha256)
    last = job.last_step(sorted(plan.evaluations.items()))
    if plan.num_steps > last or (is_complete and plan.num_steps < last):
        # Fewer steps than the settings have, stated as a complete run, would be another run.
        found.append(Difference(plan.num_steps, "number of steps", str(plan.num_steps), str(last)))
    now = str(job.identity[DATASET_INFO])
    if stated and stated != now:
        found.append(Difference(0, "dataset info", stated, now))
    if is_complete:
        try:
            final = weights_sha256(read(plan.run / WEIGHTS, job.model))
        except CheckpointError as error:
            replayer.note_mismatch(error)
            return found
        if final != plan.weights_sha256:
            stated = plan.weights_sha256[:16]
            replayer.mismatches.append(
                f"{WEIGHTS}: its tensors have sha256 {final[:16]}, recorded {stated}"
            )
    return found
