"""Replay of segments of a run on the ranks of a world, and the comparison of each step with the run's record.

    for each segment
      restore      initial weights from the seed, or the checkpoint at its start
      step         run_step as in training -> a record -> compared with `steps.bin` on rank 0
                   evaluation where training had one -> metrics compared
      end          weights and optimizer state compared with the next checkpoint, or the final weights

Nothing is written into the run folder. The first difference of a segment ends it. Only rank 0 compares. It sends the
result to the others in the flag that is reduced with the next step's gradients, as a stop of training is.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samebits.bench.bench import joined
from samebits.cluster.env import RankAssignment
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.engine.assemble import init_weights, make_job
from samebits.engine.checkpoints.restoring import restore_step
from samebits.engine.dataset_info import build_from
from samebits.engine.job import Job
from samebits.errors import CheckpointError, ConfigError
from samebits.inference.trained_model import TrainedModel
from samebits.provenance.run_identity import DATASET_INFO, identity
from samebits.provenance.step_log import FILE_NAME as STEPS
from samebits.provenance.step_log import StepLog, read_steps
from samebits.recipes.catalog import RecipeSpec
from samebits.storage.manifest import WEIGHTS
from samebits.storage.weights import read, weights_sha256
from samebits.verify.compare import Difference
from samebits.verify.files import compare_monitor, finding
from samebits.verify.replayer import Plan, Replay, Replayer
from samebits.verify.segments import Segment, describe


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


def replay_on(plan: Plan, model: TrainedModel, recipe: RecipeSpec, config: RunConfig, world: World) -> Replay:
    """Replay a plan on a world that this process has joined. Returns the verdict; complete on rank 0."""
    try:
        dataset_info = model.dataset_info(recipe, config, world)
    except CheckpointError as error:
        return Replay(
            mismatches=[finding(error, plan.run)],
            notes=["no step was replayed, since the dataset info is not the run's"],
        )
    job = make_job(config, lambda: build_from(recipe, config, dataset_info, plan.run), world)
    job.identity = identity(config, dataset_info)
    log = read_steps(plan.run / STEPS) if plan.uses_log and world.is_main else StepLog()
    replayer = Replayer(plan, job, log)
    fingerprint = job.fingerprint
    verdict = Replay(environment=fingerprint.environment, code=fingerprint.code, data=fingerprint.data)
    if world.is_main:
        verdict.differences += _compare_whole(plan, job, replayer)
    started = time.perf_counter()
    for segment in plan.segments:
        start, stop = segment.start, min(segment.stop, job.num_steps)
        if start >= stop:
            continue  # the record has more steps than the settings, which `_compare_whole` reports
        if start == 0:
            # Only possible on a fresh job: step 0 is the first of the sorted segments.
            init_weights(job, lambda: recipe.build(config, dataset_info))
        elif start in replayer.damaged and (verdict.replayed or [(0, 0)])[-1][1] == start:
            pass  # the replay has just come here, and so needs no checkpoint
        elif not _restore(job, plan.run, start, replayer):
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
    verdict.seconds = time.perf_counter() - started
    replayer.console.close()
    return verdict


def _restore(job: Job, run: Path, step: int, replayer: Replayer) -> bool:
    """Restore the checkpoint of a step, and return whether it can be used. If not, that is a finding of every rank."""
    try:
        restore_step(job, run / "checkpoints", step)
    except (CheckpointError, ConfigError) as error:
        replayer.note_damage(step, error)
        return False
    return True


def _compare_whole(plan: Plan, job: Job, replayer: Replayer) -> list[Difference]:
    """Compare what the run states about itself as a whole: its length, its dataset info and its final weights."""
    found = []
    is_complete = bool(plan.weights_sha256)
    last = job.last_step(sorted(plan.evaluations.items()))
    if plan.num_steps > last or (is_complete and plan.num_steps < last):
        # Fewer steps than the settings have, stated as a complete run, would be another run.
        found.append(Difference(plan.num_steps, "number of steps", str(plan.num_steps), str(last)))
    stated, now = plan.dataset_info_sha256, str(job.identity[DATASET_INFO])
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
            replayer.mismatches.append(f"{WEIGHTS}: its tensors have sha256 {final[:16]}, recorded {stated}")
    return found
