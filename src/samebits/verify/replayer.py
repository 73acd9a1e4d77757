"""Replay of one segment after another on a job, compared step by step with the run's record."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samebits.bench.bench import advance
from samebits.cluster import collectives
from samebits.engine.checkpoints.saving import pack_job
from samebits.engine.job import Job
from samebits.engine.output.recorder import digest_content, record_of, sample_ids
from samebits.engine.progress import StepFlags
from samebits.engine.validation import validate
from samebits.errors import CheckpointError, SamebitsError
from samebits.provenance.step_log import NO_DIGEST, StepLog
from samebits.report.console import Console
from samebits.storage import checkpoint
from samebits.storage.manifest import WEIGHTS
from samebits.storage.weights import file_limits, read
from samebits.verify.compare import Difference, compare_metrics, compare_step, compare_tensors
from samebits.verify.files import finding
from samebits.verify.segments import Segment


@dataclass(frozen=True)
class Plan:
    """What to replay; equal on all ranks."""

    run: Path  #: The run folder.
    overrides: tuple[str, ...]  #: Settings that differ from the run's and do not change the result, such as data.root.
    segments: tuple[Segment, ...]  #: The segments, by step.
    num_steps: int  #: Number of steps that the run has done.
    uses_log: bool = True  #: Whether to compare each step with `steps.bin`, not only the weights at the end.
    has_content: bool = False  #: Whether the log has digests of the samples' values.
    #: Step -> metrics of the run's evaluations.
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    weights_sha256: str = ""  #: Hash of the final weights; empty if the run is not complete.
    dataset_info_sha256: str = ""  #: Digest of what the recipe read from its data; empty if it was not recorded.


@dataclass
class Replay:
    """The result of a replay."""

    #: (start, stop) of each segment that was replayed without a difference.
    replayed: list[tuple[int, int]] = field(default_factory=list)
    #: The first difference of each other segment, and what the run states wrongly as a whole.
    differences: list[Difference] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)  #: Files of the run that cannot be read or used, one line each.
    notes: list[str] = field(default_factory=list)  #: What could not be replayed for that reason, one line each.
    #: The replay's environment: versions, processor and kernels.
    environment: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)  #: Digests of the replay's code.
    data: dict[str, str] = field(default_factory=dict)  #: Digests of the replay's samples.
    seconds: float = 0.0  #: Time of restoring, replaying and comparing, without the start of the processes, in seconds.

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Replay":
        """Read a verdict from the plain values of its fields, as they are sent between processes."""
        return cls(**{**plain, "differences": [Difference(**each) for each in plain["differences"]]})


class Replayer:
    """Replays one segment after another.

    Args:
        job: The run, with the state before the first segment.
        log: The run's record of steps, on rank 0.
    """

    def __init__(self, plan: Plan, job: Job, log: StepLog) -> None:
        self._plan, self._job, self._log = plan, job, log
        self._done, self._total = 0, sum(segment.num_steps for segment in plan.segments)
        self.damaged: set[int] = set()  #: Steps whose checkpoint cannot be used.
        self.mismatches: list[str] = []  #: Files of the run that cannot be read or used, one line each.
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
                if result.flags:  # the step before differed, and this step's flags have informed all ranks
                    break
                content = digest_content(job) if self._plan.has_content else NO_DIGEST
                if job.world.is_main:
                    difference = compare_step(self._log.get(step.number), record_of(step, result, next(ids), content))
                    self._done += 1
                    self.console.share_done("replaying", self._done, self._total)
                # Not only where the settings have one: eval_every is not part of the root.
                if (recorded := self._plan.evaluations.get(job.progress.step)) is not None:
                    # A collective call: the plan is equal on all ranks, so all of them are here.
                    metrics, _, _ = validate(job)
                    difference = difference or compare_metrics(job.progress.step, recorded, metrics)
        finally:
            loader.close()
        # After the last step there is no other one whose flags would inform the ranks.
        plain = collectives.broadcast_object(job.world, None if difference is None else asdict(difference))
        return self._compare_state(segment.stop) if plain is None else Difference(**plain)

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
                before, now = found.state.get(name), replayed["state"].get(name)
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
            return self._on_rank0(lambda: compare_tensors(step, read(self._plan.run / WEIGHTS, job.model), final))
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
