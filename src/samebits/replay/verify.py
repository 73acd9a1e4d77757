"""Verification of a run: compare its files, choose segments, replay them in a world, and give a verdict."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from samebits.bench.processes import ask_here
from samebits.config.schema import RunConfig
from samebits.errors import ConfigError, LaunchError, printable
from samebits.inference.hub import signature_of
from samebits.inference.trained_model import TrainedModel, describe_places
from samebits.process_range import ProcessRange
from samebits.provenance.fingerprint import Named
from samebits.provenance.identity import check_replay
from samebits.provenance.record import RunStatement, sha256_of_json
from samebits.provenance.run_files import RunFiles
from samebits.replay.record_files import CheckedFiles, check_files, not_compared, typed_settings
from samebits.replay.segments import (
    Difference,
    Plan,
    Replay,
    Segment,
    choose,
    covering,
    cut,
    describe,
    escape_probability,
    replay,
)
from samebits.report.console import Console
from samebits.report.format import counted

# The result of a verification: what was replayed, what differs, and what can have escaped.


@dataclass(frozen=True)
class Verdict:
    """The result of a verification."""

    root: str  #: The run's root; empty for a run that is not complete.
    num_steps: int  #: Number of steps of the run.
    #: All segments that the run was cut into.
    segments: list[Segment] = field(default_factory=list)
    chosen: list[Segment] = field(default_factory=list)  #: The segments that were to be replayed.
    #: The segments that were replayed without a difference.
    replayed: list[Segment] = field(default_factory=list)
    #: The first difference of each other segment, and what the run states wrongly as a whole.
    differences: list[Difference] = field(default_factory=list)
    #: Files of the run that contradict each other.
    mismatches: list[str] = field(default_factory=list)
    #: Code, data or versions that differ from the run's.
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  #: What could not be checked.
    seconds: float = 0.0  #: Time of the replayed steps, seconds.
    #: Whether the root determined which segments to replay; otherwise the verifier named the steps.
    is_sample: bool = True
    has_log: bool = True  #: Whether the run has a record of its steps to compare with.

    @property
    def is_verified(self) -> bool:
        """Whether everything that was chosen was replayed, and nothing differs."""
        return (
            not self.differences and not self.mismatches and set(self.chosen) <= set(self.replayed)
        )

    @property
    def share(self) -> float:
        """Fraction of the run's steps that were replayed without a difference."""
        return sum(segment.num_steps for segment in self.replayed) / max(1, self.num_steps)

    def escapes(self, num_changed: int) -> float:
        """Return the probability that changes in `num_changed` segments escape such a choice of segments.

        A sample always has the last segment, so the changes are in others.
        """
        starts = {segment.start for segment in self.replayed}
        total = len(self.segments)
        count = min(len(starts), len(self.segments))
        if self.is_sample and self.segments and self.segments[-1].start in starts:
            total = total - 1
            count = count - 1
        return escape_probability(total, count, num_changed) if total else 0.0

    def to_json(self) -> str:
        """Encode the verdict, for other programs."""
        return json.dumps(
            {**asdict(self), "is_verified": self.is_verified, "share": self.share}, indent=1
        )


def lines(verdict: Verdict) -> list[str]:
    """Return the lines that report a verdict to the user."""
    failed = [f"  FAIL     {text}" for text in verdict.mismatches]
    for each in verdict.differences:
        what = f"step {each.step:,}: {each.name}"
        failed.append(f"  FAIL     {what} recorded {each.recorded}, replayed {each.replayed}")
    num_steps = sum(segment.num_steps for segment in verdict.replayed)
    compared = (
        "samples, loss, gradient norm and weights"
        if verdict.has_log
        else "weights where a segment ends"
    )
    passed = f"  ok       {num_steps:,} of {verdict.num_steps:,} steps: equal {compared}"
    changed = [f"  differs  {text}" for text in verdict.changes]
    notes = [f"  note     {text}" for text in verdict.notes]
    texts = [*([passed] if num_steps else []), *failed, *changed, *notes]
    # Values from a stranger's files are among them.
    return [printable(text).replace("\n", " ")[:500] for text in texts] + _conclusion(verdict)


def _conclusion(verdict: Verdict) -> list[str]:
    if verdict.mismatches or verdict.differences:
        text = "NOT verified: the run's files, or its replay, differ from its record"
        if verdict.differences and verdict.changes:
            text += (
                "\n           code, data or hardware differ from the run's, which may be the cause"
            )
        return [f"result     {text}"]
    if not verdict.is_verified:
        missing = sorted(set(verdict.chosen) - set(verdict.replayed))
        return [f"result     incomplete: {describe(missing)} were not replayed"]
    if verdict.share >= 1:
        return ["verified   every step of the run"]
    if not (
        verdict.is_sample and set(verdict.replayed) <= set(verdict.segments)
    ):  # nothing was chosen at random
        return [f"verified   {describe(verdict.replayed)}: {verdict.share:.1%} of the steps"]
    few = max(2, len(verdict.segments) // 10)
    return [
        f"verified   {verdict.share:.1%} of the steps, {len(verdict.replayed)} of {len(verdict.segments)} segments",
        f"           a change in 1 segment is missed with probability {verdict.escapes(1):.2f}, "
        f"in {few} segments {verdict.escapes(few):.2f}",
    ]


@dataclass(frozen=True)
class Request:
    """What to verify, as the user requested it."""

    run: Path  #: The run folder.
    overrides: tuple[str, ...] = ()  #: Settings that do not change the result, such as data.root.
    share: float = 1.0  #: Fraction of the steps to replay, chosen by the root.
    steps: tuple[int, int] | None = None  #: (start, stop): replay these steps instead.
    from_scratch: bool = False  #: Replay the whole run from its settings, without its checkpoints.
    challenge: str = ""  #: The verifier's own number, mixed into the choice; empty: the root alone.
    procs: int = 1  #: Processes.
    any_signer: bool = (
        False  #: Accept a published model that none of the user's trusted keys has signed.
    )


def verify(
    request: Request,
    console: Console | None = None,
    run_replay: Callable[[Plan, RunConfig, int], Replay] | None = None,
) -> Verdict:
    """Verify a run. Nothing is written into its folder.

    Args:
        console: Receives a line before the replay starts; None: nothing is printed.
        run_replay: Replays a plan, given settings and number of processes; None: in processes of its own, or in this
            one if there is one.

    Raises:
        ConfigError: The run is not exact, has no steps, or a setting that changes the result was given.
        SamebitsError: The run cannot be opened or replayed.
    """
    model = TrainedModel(request.run, request.overrides)
    recipe, config = model.settings()
    check_replay(request.run, config)
    files = check_files(RunFiles(request.run), config)
    files.mismatches += typed_settings(request.run, recipe)
    signature = signature_of(request.run)
    if signature.problem and not (request.any_signer and not signature.is_wrong):
        files.mismatches.append(signature.problem)
    elif signature.text:
        files.notes.append(signature.text)
    if files.num_steps == 0:
        raise ConfigError(
            f"{request.run} has no record of steps, so there is nothing to verify",
            cause="\n".join([*files.mismatches, *files.notes]),
            fix="Train it with this version of Samebits and record.steps=true.",
        )
    segments = cut(files.checkpoints, files.num_steps)
    chosen = _choose(request, segments, files)
    if console is not None:
        root = files.record.root[:8] + "…" if files.record is not None else "none"
        count = counted(len(segments), "segment")
        console.say(f"run        {request.run}, {files.num_steps:,} steps in {count}, root {root}")
        if place := describe_places(config):
            record = files.record
            digest = (
                ""
                if record is None
                else f"; recorded digest of samples {sha256_of_json(record.data)[:8]}…"
            )
            console.say(f"data       {place}{digest}")
    try:
        model.check_settings(recipe)
    except ConfigError as error:  # they are not those in the run's checkpoint
        if not any(text.startswith("config.yaml:") for text in files.mismatches):
            altered = error.slots.get("given", error.what).split("\n")
            files.mismatches += [f"config.yaml: {text}" for text in altered]
        done = Replay(
            notes=["no step was replayed, since config.yaml does not have the run's settings"]
        )
        return _judge(request, files, segments, chosen, done)
    if console is not None:
        console.say(f"replaying  {describe(chosen)} on {counted(request.procs, 'process')}")
    plan = Plan(
        run=request.run.absolute(),
        overrides=request.overrides,
        segments=tuple(chosen),
        num_steps=files.num_steps,
        eval_batches=tuple(
            dict.fromkeys([config.eval_batch, recipe.load().config.eval_batch, *files.eval_batches])
        ),
        from_scratch=request.from_scratch,
        uses_log=bool(len(files.log)),
        has_content=files.log.has_content,
        evaluations=files.evaluations,
        weights_sha256="" if files.record is None else files.record.weights_sha256,
        dataset_info_sha256="" if files.record is None else files.record.dataset_info_sha256,
    )
    done = (run_replay or _replay)(plan, config, request.procs)
    return _judge(request, files, segments, chosen, done)


def _choose(request: Request, segments: list[Segment], files: CheckedFiles) -> list[Segment]:
    if request.steps is not None:
        first, stop = request.steps
        if not 0 <= first < stop <= files.num_steps:
            raise ConfigError(
                f"--steps is {first}:{stop}",
                allowed=f"A:B with 0 <= A < B <= {files.num_steps}",
                fix=f"Give steps of this run, such as --steps 0:{files.num_steps}.",
            )
        covered = covering(segments, first, stop)
        # Without records, only the state at the end of a whole segment can be compared.
        return (
            covered
            if len(files.log)
            else [each for each in segments if each.start in {one.start for one in covered}]
        )
    root = "" if files.record is None else files.record.root
    return choose(segments, request.share, f"{root} {request.challenge}".rstrip())


def _replay(plan: Plan, config: RunConfig, procs: int) -> Replay:
    failure = LaunchError("the replay failed", fix="Read the output above; repeat with --procs 1.")
    return TypeAdapter(Replay).validate_python(
        ask_here(replay, (plan,), ProcessRange(procs, procs), config, failure, [replay.__module__])
    )


def _judge(
    request: Request,
    files: CheckedFiles,
    segments: list[Segment],
    chosen: list[Segment],
    done: Replay,
) -> Verdict:
    pairs = _pairs(files.record, done)
    changes = [text for pair in pairs for text in _changes(*pair)]
    # An environment has what a machine has: only digests of code and data are missed.
    notes = [*files.notes, *done.notes, *(text for pair in pairs[1:] for text in _unpaired(*pair))]
    if files.log.first_step:
        notes.append(
            f"steps before {files.log.first_step:,} were replayed without a record to compare with"
        )
    others = ", ".join([*not_compared(request.run), "times"])
    notes.append(f"not compared: {others}")
    return Verdict(
        root="" if files.record is None else files.record.root,
        num_steps=files.num_steps,
        segments=segments,
        chosen=chosen,
        replayed=[Segment(start, stop) for start, stop in done.replayed],
        differences=done.differences,
        mismatches=list(dict.fromkeys([*files.mismatches, *done.mismatches])),
        changes=changes,
        notes=notes,
        seconds=done.seconds,
        is_sample=request.steps is None,
        has_log=bool(len(files.log)),
    )


def _pairs(record: RunStatement | None, done: Replay) -> list[tuple[Named, Named]]:
    """Return environment, code and data of the run's last world and of the replay."""
    if record is None:
        return []
    return [
        ([{}, *record.environment][-1], done.environment),
        ([{}, *record.code][-1], done.code),
        (record.data, done.data),
    ]


def _unpaired(before: Named, now: Named) -> list[str]:
    """Name the digests that only the statement or only the replay has."""
    if not (before and now):
        return []
    missing = sorted(before.keys() - now.keys())
    return [
        *(f"not compared: {name}, which this replay does not have" for name in missing),
        *(f"not stated: {name}" for name in sorted(now.keys() - before.keys())),
    ]


def _changes(before: Named, now: Named) -> list[str]:
    return [
        f"{name}: {before[name]} in the run, {now[name]} now"
        for name in before
        if name in now and before[name] != now[name]
    ]
