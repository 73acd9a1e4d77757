"""Finds out why a step's loss or gradient was not finite, says it, and does what is asked for then.

All ranks know of it at once, as they hold the same sums. Each then runs its micro-batches of the step again, one by
one: the same samples, random numbers and weights, so the same values, and looks at each before it is summed.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from lockstep.cluster import collectives
from lockstep.data.keyed import seed_forward
from lockstep.data.loader import read
from lockstep.data.order import MicroBatch, Step
from lockstep.data.samples import Batch
from lockstep.engine.forward import forward
from lockstep.engine.job import Job
from lockstep.engine.reports import Reports
from lockstep.engine.saving import CheckpointManager
from lockstep.errors import TrainError
from lockstep.storage.run_folder import RunFolder, write_atomically


class RollBack(Exception):
    """A step was not finite, and the run is to go on from its last checkpoint."""


def handle_nonfinite(job: Job, step: Step, saver: CheckpointManager, reports: Reports) -> None:
    """Say what is wrong and do what `watch.nonfinite` says; returns only if the step is to be skipped."""
    policy = job.config.watch.nonfinite
    last = saver.last_step(job.world)
    kept = f"nothing was changed by this step; {f'checkpoint of step {last} is whole' if last else 'no checkpoint yet'}"
    if policy == "rollback" and (last is None or step.number in saver.rolled_back):
        policy = "stop"
        kept += "; going back did not help" if step.number in saver.rolled_back else ""
    error = explain(job, step, saver.folder, f"{policy} (watch.nonfinite={job.config.watch.nonfinite}); {kept}")
    if policy == "stop":
        raise error
    reports.say(error)
    if policy == "rollback":
        saver.rolled_back.add(step.number)
        raise RollBack
    job.progress.skipped.append(step.number)


def explain(job: Job, step: Step, folder: RunFolder, doing: str) -> TrainError:
    """Look for the micro-batch that is to blame. Called on all ranks, with the weights as they were before the step.

    Args:
        job: The run.
        step: The step's plan.
        folder: Gets `nonfinite-STEP.json`, with all samples of the micro-batch, from rank 0.
        doing: What happens now.

    Returns:
        The text, equal on all ranks.
    """
    suspects: dict[int, tuple[int, int]] = {}
    mine = job.reducer.run(lambda micro_batch: _examine(job, micro_batch), suspects)
    job.reducer.undo_buffers()
    findings = [pair for rank in collectives.all_gather_object(job.world, (mine, suspects)) for pair in _dated(*rank)]
    _, guilty = min(findings, key=lambda pair: pair[0], default=(None, None))
    if guilty is None:
        likely = "the gradient's norm is too large for float32, or memory or the device had a fault"
        if job.config.compress == "fp16":
            likely = "a gradient, or a sum of some, is above 65,504, the largest number of compress=fp16; bf16 has room"
        again = f"each micro-batch run again gave finite {'values' if job.shards is None else 'losses'}"
        what = f"loss or gradient is not finite at step {step.number}"
        return TrainError(what, cause=f"{likely}: {again}", doing=doing)
    report = folder.path / f"nonfinite-{step.number}.json"
    if job.world.is_main:
        write_atomically(report, json.dumps({"step": step.number, **guilty}, indent=1).encode())
    indices = guilty["samples"]
    some = " ".join(map(str, indices[:8])) + (" …" if len(indices) > 8 else "")
    what = "loss" if not math.isfinite(guilty["loss"]) else "gradient"
    return TrainError(
        f"{what} is not finite at step {step.number} on rank {guilty['rank']}, micro-batch {guilty['micro_batch']}",
        loss=f"{guilty['loss']:g}",
        samples=f"{some} ({len(indices)} in all: {report})",
        largest=f"gradient of {guilty['largest_name']}: {guilty['largest']:g}" if "largest" in guilty else None,
        doing=doing,
    )


def _dated(
    findings: list[dict[str, Any]], suspects: dict[int, tuple[int, int]]
) -> list[tuple[tuple[int, int, int], dict[str, Any]]]:
    """What is not finite, each with when it came up: the phase, the number of the batch norm, and the micro-batch.

    Synchronised batch norm spreads what is not finite to all micro-batches. The one to blame is the first, be it in the
    forward pass (0), in the loss (1), in the backward pass (2) or, for all others, in a gradient (3).
    """
    dated = []
    for finding in findings:
        number = finding["micro_batch"]
        in_loss = (3, 0) if math.isfinite(finding["loss"]) else (1, 0)
        if not finding["is_finite"]:
            dated.append(((*min(in_loss, suspects.get(number, (3, 0))), number), finding))
    return dated


def _examine(job: Job, micro_batch: MicroBatch) -> dict[str, Any]:
    batch = read(job.train_data, micro_batch.indices, micro_batch.keys).to(job.world.device)
    job.reducer.undo_buffers()
    seed_forward(micro_batch.forward_key, job.world.device)
    if job.shards is not None:
        return _look_at_loss(job, micro_batch, batch)
    _, loss, _ = forward(job, batch)
    named = {name: parameter for name, parameter in job.model.named_parameters() if parameter.requires_grad}
    # Not backward(): other micro-batches may be under way, and would add to the same gradients.
    scale = micro_batch.weight * job.progress.loss_scale
    gradients = torch.autograd.grad(loss * scale, [*named.values()], allow_unused=True)
    sizes = {
        name: float(gradient.abs().max()) / scale
        for name, gradient in zip(named, gradients, strict=True)
        if gradient is not None
    }
    # NaN is not larger than anything, and says more than infinity: it is looked for first.
    worst = max(sizes, key=lambda name: (math.isnan(sizes[name]), sizes[name]))
    return {
        "rank": job.world.rank,
        "micro_batch": micro_batch.index,
        "loss": loss.item(),
        "largest_name": worst,
        "largest": sizes[worst],
        "is_finite": math.isfinite(loss.item()) and all(map(math.isfinite, sizes.values())),
        "samples": micro_batch.indices.tolist(),
    }


def _look_at_loss(job: Job, micro_batch: MicroBatch, batch: Batch) -> dict[str, Any]:
    """Of a sharded model no rank ever sees a micro-batch's own gradient."""
    with torch.no_grad():
        loss = forward(job, batch)[1].item()
    return {
        "rank": job.world.rank,
        "micro_batch": micro_batch.index,
        "loss": loss,
        "is_finite": math.isfinite(loss),
        "samples": micro_batch.indices.tolist(),
    }
