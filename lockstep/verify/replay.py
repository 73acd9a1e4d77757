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
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from lockstep.provenance.run_identity import identity
from lockstep.provenance.step_log import FILE_NAME as STEPS
from lockstep.provenance.step_log import NO_DIGEST, StepLog, StepRecord, read_steps
from lockstep.recipes.catalog import RecipeSpec
from lockstep.report.console import Console
from lockstep.storage import checkpoint
from lockstep.storage.manifest import WEIGHTS
from lockstep.storage.weights import file_limits, read, weights_sha256
from lockstep.verify.segments import Segment


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
    """

    run: Path
    overrides: tuple[str, ...]
    segments: tuple[tuple[int, int], ...]
    num_steps: int
    uses_log: bool = True
    has_content: bool = False
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    weights_sha256: str = ""


@dataclass(frozen=True)
class Difference:
    """The first difference of a segment.

    Attributes:
        step: The step, from 0; for weights and metrics, the number of steps done.
        name: What differs: loss, gradient norm, learning rate, samples, content, outcome, a metric, or a tensor.
        recorded: The value in the run's record.
        replayed: The value of the replay.
    """

    step: int
    name: str
    recorded: str
    replayed: str


@dataclass
class Replay:
    """The result of a replay.

    Attributes:
        replayed: (start, stop) of each segment that was replayed, up to its first difference.
        differences: The first difference of each segment that has one.
        environment: The replay's environment: versions, processor and kernels.
        code: Digests of the replay's code.
        data: Digests of the replay's samples.
        seconds: Time of the steps, without start and restore, in seconds.
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
    if world.is_main and plan.weights_sha256:
        found = weights_sha256(read(plan.run / WEIGHTS, job.model))
        if found != plan.weights_sha256:
            verdict.differences.append(Difference(plan.num_steps, WEIGHTS, plan.weights_sha256, found))
    for start, stop in plan.segments:
        if start == 0:
            # Only possible on a fresh job: step 0 is the first of the sorted segments.
            init_weights(job, lambda: recipe.build(config, dataset_info))
        else:
            restore_job(
                job, plan.run / "checkpoints", str(plan.run / "checkpoints" / checkpoint.name_of(start)), _raise
            )
        difference = replayer.replay(Segment(start, stop))
        verdict.replayed.append((start, job.progress.step))
        verdict.differences += [] if difference is None else [difference]
    verdict.seconds = job.world.activity.work_s + job.world.activity.wait_s
    replayer.console.close()
    return verdict


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
                    difference = self._compare_step(record_of(step, result, next(ids), content))
                    self._done += 1
                    self.console.share_done("replaying", self._done, self._total)
                if job.is_evaluation_due() and job.progress.step in self._plan.evaluations:
                    evaluated = self._evaluate()
                    difference = evaluated if difference is None else difference
        finally:
            loader.close()
        plain = collectives.broadcast_object(job.world, None if difference is None else asdict(difference))
        return self._compare_state(segment.stop) if plain is None else Difference(**plain)

    def _compare_step(self, replayed: StepRecord) -> Difference | None:
        """Compare a step with the log. Values are compared by their bits."""
        recorded = self._log.get(replayed.step)
        if recorded is None or recorded.to_bytes() == replayed.to_bytes():
            return None
        # In this order: what a step reads comes before what follows from it.
        for name, attribute in NAMES.items():
            before, now = getattr(recorded, attribute), getattr(replayed, attribute)
            if _text(before) != _text(now):
                return Difference(replayed.step, name, _text(before), _text(now))
        return None

    def _evaluate(self) -> Difference | None:
        """Evaluate the current weights and compare the metrics."""
        step = self._job.progress.step
        metrics, _, _ = validate(self._job)
        recorded = self._plan.evaluations[step]
        for name in sorted(recorded.keys() | metrics.keys()):
            value = metrics.get(name)
            now = value if value is not None and math.isfinite(value) else None  # as in metrics.jsonl
            if recorded.get(name) != now:
                return Difference(step, f"metric {name}", repr(recorded.get(name)), repr(now))
        return None

    def _compare_state(self, step: int) -> Difference | None:
        """Compare weights and optimizer state after a segment with the checkpoint or the final weights there."""
        job = self._job
        mine, _ = pack_job(job)
        final = job.final_weights() if self._plan.weights_sha256 and step == self._plan.num_steps else None
        difference: Difference | None = None
        if job.world.is_main:
            path = self._plan.run / "checkpoints" / checkpoint.name_of(step)
            if path.is_dir():
                tensors, _ = checkpoint.pack(checkpoint.load_checkpoint(path, file_limits(job.model)))
                difference = _first_difference(step, tensors, mine)
            if final is not None and difference is None:
                weights = self._plan.run / WEIGHTS
                difference = _first_difference(step, read(weights, job.model), final)
        plain = collectives.broadcast_object(job.world, None if difference is None else asdict(difference))
        return None if plain is None else Difference(**plain)


# What is compared, and the attribute of `StepRecord`.
NAMES = {
    "samples": "samples",
    "samples' values": "content",
    "learning rate": "lr",
    "loss": "loss",
    "gradient norm": "norm",
    "outcome": "outcome",
}


def _text(value: float | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _first_difference(step: int, recorded: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> Difference | None:
    """Return the first tensor, in the order of the replay's names, that differs in a bit."""
    for name in [*replayed, *(name for name in recorded if name not in replayed)]:
        before, now = recorded.get(name), replayed.get(name)
        if before is None or now is None:
            return Difference(
                step, f"tensor {name}", "none" if before is None else "present", "none" if now is None else "present"
            )
        now = now.detach().cpu()
        if before.dtype != now.dtype or before.shape != now.shape:
            return Difference(step, f"tensor {name}", _kind(before), _kind(now))
        # In bytes: NaN would differ from itself, and 0.0 equals -0.0.
        unequal = _bytes(before) != _bytes(now)
        if bool(unequal.any()):
            element = int(unequal.nonzero()[0]) // now.element_size()
            index = tuple(int(axis) for axis in np.unravel_index(element, now.shape)) if now.dim() else ()
            return Difference(step, f"tensor {name}{list(index)}", repr(before[index].item()), repr(now[index].item()))
    return None


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
