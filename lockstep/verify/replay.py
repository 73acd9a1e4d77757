"""Replay of segments of a run on the ranks of a world, and the comparison of each step with the run's record.

    for each segment
      restore      initial weights from the seed, or the checkpoint at its start
      step         run_step as in training -> a record -> compared with `steps.bin` on rank 0
                   evaluation where training had one -> metrics compared
      end          weights and optimizer state compared with the next checkpoint, or the final weights

Nothing is written into the run folder. The first difference of a segment ends it. Rank 0 alone compares, and tells the
others through the flag that travels with the next step's gradients, as a stop of training does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.cluster import collectives
from lockstep.cluster.env import ALONE, RankAssignment, read_assignment
from lockstep.cluster.world import World
from lockstep.config.schema import RunConfig
from lockstep.engine.assemble import init_weights, make_job
from lockstep.engine.dataset_info import build_from
from lockstep.engine.job import Job
from lockstep.engine.output.recorder import digest_content, record_of, sample_ids
from lockstep.engine.restoring import restore_job
from lockstep.engine.saving import pack_job
from lockstep.engine.step import run_step
from lockstep.engine.validation import validate
from lockstep.errors import CheckpointError
from lockstep.inference.trained_model import TrainedModel
from lockstep.launch.start import join_world
from lockstep.provenance.run_identity import FACTS, identity
from lockstep.provenance.step_log import FILE_NAME as STEPS
from lockstep.provenance.step_log import NO_DIGEST, StepLog, read_steps
from lockstep.recipes.catalog import RecipeSpec
from lockstep.report.console import Console
from lockstep.storage import checkpoint
from lockstep.storage.manifest import WEIGHTS
from lockstep.storage.weights import file_limits, read, weights_sha256
from lockstep.verify.compare import Difference, compare_metrics, compare_plain, compare_steps, compare_tensors
from lockstep.verify.segments import Segment

SCALE = ("loss_scale", "scale_age")  # of a checkpoint's progress: what the following steps depend on, beside tensors


@dataclass(frozen=True)
class Plan:
    """What to replay; equal on all ranks.

    Attributes:
        run: The run folder.
        overrides: Settings that differ from the run's and do not change the result, such as data.root.
        segments: (start, stop) of each segment.
        num_steps: Number of steps that the run has done.
        uses_log: Whether to compare each step with `steps.bin`, not only the weights at the end.
        has_content: Whether the log has digests of the samples' values.
        evaluations: Step -> metrics of the run's evaluations.
        weights_sha256: Hash of the final weights; empty if the run is not complete.
        dataset_info_sha256: Digest of what the recipe read from its data; empty if it was not recorded.
    """

    run: Path
    overrides: tuple[str, ...]
    segments: tuple[tuple[int, int], ...]
    num_steps: int
    uses_log: bool = True
    has_content: bool = False
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    weights_sha256: str = ""
    dataset_info_sha256: str = ""


@dataclass
class Replay:
    """The result of a replay.

    Attributes:
        replayed: (start, stop) of each segment that was replayed without a difference.
        differences: The first difference of each other segment, and what the run states wrongly as a whole.
        environment: The replay's environment: versions, processor and kernels.
        code: Digests of the replay's code.
        data: Digests of the replay's samples.
        seconds: Time of restoring, replaying and comparing, without the start of the processes, in seconds.
    """

    replayed: list[tuple[int, int]] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> str:
        """Encode the verdict; `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Replay:
        """Decode what `to_json` wrote."""
        plain = json.loads(text)
        plain["replayed"] = [(int(start), int(stop)) for start, stop in plain["replayed"]]
        plain["differences"] = [Difference(**each) for each in plain["differences"]]
        return cls(**plain)


def replay(plan: Plan, answer: Path, here: RankAssignment | None = None) -> int:
    """Replay a plan as one process of a world; rank 0 writes the verdict to `answer`.

    Args:
        plan: The plan.
        answer: Path of the JSON file.
        here: This process's rank; None: read from the environment.

    Raises:
        LockstepError: The run cannot be replayed: recipe, data, settings or a checkpoint are missing or were altered.
    """
    model = TrainedModel(plan.run, plan.overrides)
    recipe, config = model.settings()
    with join_world(here or read_assignment(os.environ) or ALONE, config) as world:
        verdict = replay_on(plan, model, recipe, config, world)
        if world.is_main:
            answer.write_text(verdict.to_json(), encoding="utf-8")
    return 0


def replay_on(plan: Plan, model: TrainedModel, recipe: RecipeSpec, config: RunConfig, world: World) -> Replay:
    """Replay a plan on a world that this process has joined.

    Args:
        plan: The plan.
        model: The run, as a trained model.
        recipe: Its recipe.
        config: Its settings, with the overrides.
        world: The processes.

    Returns:
        The verdict; complete on rank 0.
    """
    dataset_info = model.dataset_info(recipe, config, world)
    job = make_job(config, lambda: build_from(recipe, config, dataset_info, plan.run), world)
    job.identity = identity(config, dataset_info)
    log = read_steps(plan.run / STEPS) if plan.uses_log and world.is_main else StepLog()
    replayer = _Replayer(plan, job, log)
    fingerprint = job.fingerprint
    verdict = Replay(environment=fingerprint.environment, code=fingerprint.code, data=fingerprint.data)
    if world.is_main:
        verdict.differences += _compare_whole(plan, job)
    started = time.perf_counter()
    for start, stop in ((start, min(stop, job.num_steps)) for start, stop in plan.segments):
        if start >= stop:
            continue  # the record has more steps than the settings: a difference by itself
        if start == 0:
            # Only possible on a fresh job: step 0 is the first of the sorted segments.
            init_weights(job, lambda: recipe.build(config, dataset_info))
        else:
            restore_job(
                job, plan.run / "checkpoints", str(plan.run / "checkpoints" / checkpoint.name_of(start)), _raise
            )
        difference = replayer.replay(Segment(start, stop))
        if difference is None:
            verdict.replayed.append((start, stop))
        else:
            verdict.differences.append(difference)
    verdict.seconds = time.perf_counter() - started
    replayer.console.close()
    return verdict


def _compare_whole(plan: Plan, job: Job) -> list[Difference]:
    """Compare what the run states about itself as a whole: its length, its dataset info and its final weights."""
    found = []
    is_complete = bool(plan.weights_sha256)
    if plan.num_steps > job.num_steps or (is_complete and plan.num_steps < job.num_steps):
        # Fewer steps than the settings have, stated as a complete run, would be another run.
        found.append(Difference(plan.num_steps, "number of steps", str(plan.num_steps), str(job.num_steps)))
    stated, now = plan.dataset_info_sha256, str(job.identity[FACTS])
    if stated and stated != now:
        found.append(Difference(0, "dataset info", stated, now))
    if is_complete:
        final = weights_sha256(read(plan.run / WEIGHTS, job.model))
        if final != plan.weights_sha256:
            found.append(Difference(plan.num_steps, WEIGHTS, plan.weights_sha256, final))
    return found


def _raise(error: CheckpointError) -> None:
    raise error


class _Replayer:
    """Replays one segment after another.

    Args:
        plan: The plan.
        job: The run, with the state before the first segment.
        log: The run's record of steps, on rank 0.
    """

    def __init__(self, plan: Plan, job: Job, log: StepLog) -> None:
        self._plan, self._job, self._log = plan, job, log
        self._done, self._total = 0, sum(stop - start for start, stop in plan.segments)
        self.console = Console(sys.stderr)

    def replay(self, segment: Segment) -> Difference | None:
        """Replay a segment from the job's current state; return the first difference, on every rank."""
        job = self._job
        loader = job.open_loader()
        if self._plan.has_content:
            loader.digests = []
        ids = sample_ids(job.order, segment.start, segment.stop)
        difference: Difference | None = None
        try:
            for step in job.order.steps(job.world, start=segment.start, stop=segment.stop):
                result = run_step(job, step, loader, 1.0 if difference is not None else 0.0)
                if int(result.flag):  # the step before differed, and this one has told all ranks
                    break
                if not result.is_finite and not result.is_overflow:
                    job.progress.skipped.append(step.number)
                job.progress.step = step.number + 1
                content = digest_content(job) if self._plan.has_content else NO_DIGEST
                if job.world.is_main:
                    difference = compare_steps(self._log.get(step.number), record_of(step, result, next(ids), content))
                    self._done += 1
                    self.console.share_done("replaying", self._done, self._total)
                # Not only where the settings have one: eval_every is not part of the root.
                if (recorded := self._plan.evaluations.get(job.progress.step)) is not None:
                    metrics, _, _ = validate(job)
                    difference = difference or compare_metrics(job.progress.step, recorded, metrics)
        finally:
            loader.close()
        plain = collectives.broadcast_object(job.world, None if difference is None else asdict(difference))
        return self._compare_state(segment.stop) if plain is None else Difference(**plain)

    def _compare_state(self, step: int) -> Difference | None:
        """Compare weights and optimizer state after a segment with the checkpoint or the final weights there."""
        job = self._job
        mine, plain_state = pack_job(job)
        final = job.final_weights() if self._plan.weights_sha256 and step == self._plan.num_steps else None
        difference: Difference | None = None
        if job.world.is_main:
            path = self._plan.run / "checkpoints" / checkpoint.name_of(step)
            if path.is_dir():
                tensors, recorded = checkpoint.pack(checkpoint.load_checkpoint(path, file_limits(job.model)))
                difference = compare_tensors(step, tensors, mine)
                # The rest of `state.json` has no influence on the following steps.
                difference = difference or compare_plain(step, recorded["state"], plain_state["state"], SCALE)
            if final is not None and difference is None:
                weights = self._plan.run / WEIGHTS
                difference = compare_tensors(step, read(weights, job.model), final)
        plain = collectives.broadcast_object(job.world, None if difference is None else asdict(difference))
        return None if plain is None else Difference(**plain)
