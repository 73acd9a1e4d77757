"""The forward pass of a micro-batch, and the diagnosis of a step whose loss or gradient is not finite."""

import json
import math
import os
import shlex
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.cluster import collectives
from samebits.data.division import two_or_more
from samebits.data.order import MicroBatch, Step
from samebits.data.samples import Batch, describe
from samebits.data.seeding import seed_forward
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.job import MAX_TERMS, Job
from samebits.engine.output.reports import Reports
from samebits.errors import ConfigError, TrainError
from samebits.storage.run_folder import RunFolder, write_atomically

# The forward pass of a micro-batch through model and loss, with checks of the recipe's loss.


_SHOWN = 8  # samples, in an error


def forward(job: Job, batch: Batch) -> tuple[list[str], Tensor, Tensor]:
    """Run the forward pass of a micro-batch, whose tensors, on the device, have any shape `(N, ...)`.

    Returns:
        The names of the loss's terms, their sum (0-d), and their detached values (MAX_TERMS,), padded with zeros.

    Raises:
        ConfigError: The recipe's loss returns a wrong type, or has no gradient.
    """
    try:
        outputs = (job.compiled or job.model)(batch.inputs)
    except ValueError as error:
        # torch raises a plain ValueError for it, so only the text distinguishes it from errors of the recipe.
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            "batch norm can't normalize a micro-batch of one sample whose feature maps have one pixel",
            given=f"global_batch={job.config.global_batch}, micro_batch={job.config.micro_batch}: "
            f"an epoch of {job.order.num_samples:,} samples has such a micro-batch",
            fix=two_or_more(job.order.num_samples, job.config.global_batch, job.config.micro_batch),
        ) from None
    try:
        terms = job.parts.loss(outputs, batch)
    except Exception as error:
        error.add_note(_describe_micro_batch(outputs, batch))
        raise
    check_terms(terms)
    values = torch.stack([term.float() for term in terms.values()])
    # Padded, since the extras are part of messages whose size was fixed before the first loss was known.
    return list(terms), values.sum(), F.pad(values.detach(), (0, MAX_TERMS - len(values)))


def _describe_micro_batch(outputs: object, batch: Batch) -> str:
    """Describe what a loss has failed on: "samples 3 5 7 …; outputs: a tensor (8, 3) float32; targets: ... 0 to 7"."""
    samples = batch.indices.tolist()
    targets = batch.targets
    text = f"raised by the recipe's loss for samples {' '.join(map(str, samples[:_SHOWN]))}"
    text += f"{' …' * (len(samples) > _SHOWN)}; outputs: {describe(outputs)}; targets: {describe(targets)}"
    if (
        isinstance(targets, Tensor)
        and targets.numel()
        and targets.device.type == "cpu"
        and not targets.is_complex()
    ):
        text += f", {targets.min().item():g} to {targets.max().item():g}"
    return text


def check_terms(terms: object) -> None:
    """Check what a recipe's loss returned."""
    if not isinstance(terms, Mapping):
        raise ConfigError(
            f"the recipe's loss returned a {type(terms).__name__}, not a dict of named terms",
            fix='Return {"loss": ...}.',
        )
    if not 0 < len(terms) <= MAX_TERMS:
        raise ConfigError(
            f"the recipe's loss returned {len(terms)} terms",
            allowed=f"1 to {MAX_TERMS}",
            fix="Add some of them up, or return at least one.",
        )
    for name, term in terms.items():
        if not isinstance(term, Tensor):
            raise ConfigError(
                f"the recipe's loss returned {name} as a {type(term).__name__}, not a tensor",
                fix="Return a tensor that torch computed.",
            )
        if term.dim() != 0:
            raise ConfigError(
                f"the recipe's loss returned {name} of shape {tuple(term.shape)}, not one number",
                fix="Return the mean over the batch's samples.",
            )
        if not term.is_floating_point():
            raise ConfigError(
                f"the recipe's loss returned {name} as {term.dtype}, which has no gradient",
                fix="Compute it in floating point, without .long() or counts.",
            )
    if torch.is_grad_enabled() and not any(term.requires_grad for term in terms.values()):
        raise ConfigError(
            "the recipe's loss has no gradient, so nothing would be trained",
            given=f"terms: {', '.join(map(str, terms))}",
            cause="The outputs were detached, or passed through argmax, NumPy or torch.no_grad() in forward or loss.",
            fix="Compute the loss from the model's outputs with differentiable torch functions.",
        )


# Diagnosis of a step whose loss or gradient is not finite, and the configured reaction (`watch.nonfinite`).
#
# All ranks see it at once, since they have the same sums. Each rank then runs its micro-batches of the step again,
# one at a time, with the same samples, random numbers and weights, hence the same values, and checks each before it
# is summed.


_FIX = "Correct or remove these samples, lower optim.lr, or set watch.nonfinite=skip or rollback."


class RollBack(Exception):
    """A step was not finite, and the run has been restored from its last checkpoint."""


def handle_nonfinite(
    job: Job, step: Step, checkpoints: CheckpointManager, reports: Reports
) -> None:
    """Report the cause and apply the policy `watch.nonfinite`. Returns only if the step is skipped.

    Raises:
        TrainError: The policy is "stop", or a rollback is impossible or did not help.
        RollBack: The policy is "rollback".
    """
    policy = job.config.watch.nonfinite
    # Collective and blocking: before the policy is decided, so that all ranks call it.
    last = checkpoints.last_step(job.world)
    state = f"the step changed nothing; {f'checkpoint of step {last} is whole' if last else 'no checkpoint yet'}"
    # The step has the same bits after a rollback, so a second one would never end.
    if policy == "rollback" and (last is None or step.number in checkpoints.rolled_back):
        policy = "stop"
        state += "; rolling back did not help" if step.number in checkpoints.rolled_back else ""
    error = explain(
        job,
        step,
        checkpoints.folder,
        f"{policy} (watch.nonfinite={job.config.watch.nonfinite}); {state}",
    )
    if policy == "stop":
        raise error
    reports.notify(error)
    if policy == "rollback":
        checkpoints.rolled_back.add(step.number)
        checkpoints.restore(job, "auto", reports.notify)
        raise RollBack
    job.progress.skipped.append(step.number)


def explain(job: Job, step: Step, folder: RunFolder, reaction: str) -> TrainError:
    """Return the error, equal on all ranks, and write the micro-batch to blame into `nonfinite-STEP.json` on rank 0."""
    fix = f"samebits debug {shlex.quote(str(folder.path))} --step {step.number}"
    fix = f"Look at the step: {fix}\n{_FIX}"
    suspects: dict[int, tuple[int, int]] = {}
    mine = job.reducer.run(lambda micro_batch: _examine(job, micro_batch), suspects)
    # The repeated passes have changed buffers, and a skipped step must leave no trace.
    job.reducer.undo_buffers()
    findings = [
        pair
        for rank in collectives.all_gather_object(job.world, (mine, suspects))
        for pair in _dated(*rank)
    ]
    _, guilty = min(findings, key=lambda pair: pair[0], default=(None, None))
    if guilty is None:
        cause = "the gradient's norm is too large for float32, or memory or the device had a fault"
        again = "each micro-batch run again has finite values"
        what = f"loss or gradient is not finite at step {step.number}"
        return TrainError(what, given=reaction, cause=f"{cause}: {again}", fix=fix)
    report = folder.path / f"nonfinite-{step.number}.json"
    if job.world.is_main:
        write_atomically(report, json.dumps({"step": step.number, **guilty}, indent=1).encode())
    indices = guilty["samples"]
    some = " ".join(map(str, indices[:8])) + (" …" if len(indices) > 8 else "")
    what = "loss" if not math.isfinite(guilty["loss"]) else "gradient"
    values = [f"loss {guilty['loss']:g}"]
    if "largest" in guilty:
        values.append(f"gradient of {guilty['largest_name']}: {guilty['largest']:g}, the largest")
    return TrainError(
        f"{what} is not finite at step {step.number} on rank {guilty['rank']}, micro-batch {guilty['micro_batch']}",
        given="\n".join([*values, f"reaction: {reaction}"]),
        where=f"rank {guilty['rank']} (host {guilty['host']}, pid {guilty['pid']})\n"
        f"samples {some} ({len(indices)} in all: {report})",
        fix=fix,
    )


def _dated(
    findings: list[dict[str, Any]], suspects: dict[int, tuple[int, int]]
) -> list[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Pair each non-finite finding with its time: phase, number of the batch norm, and micro-batch.

    Synchronized batch norm spreads a non-finite value to all micro-batches. The cause is the earliest one: in the
    forward pass (phase 0), the loss (1), the backward pass (2), or otherwise in a gradient (3).
    """
    dated = []
    for finding in findings:
        number = finding["micro_batch"]
        in_loss = (3, 0) if math.isfinite(finding["loss"]) else (1, 0)
        if not finding["is_finite"]:
            dated.append(((*min(in_loss, suspects.get(number, (3, 0))), number), finding))
    return dated


def _examine(job: Job, micro_batch: MicroBatch) -> dict[str, Any]:
    assert job.loader is not None
    # `again`: the stream of the workers is past these samples, so this process reads them.
    batch = job.loader.batch(micro_batch.indices, micro_batch.keys, again=True)
    job.reducer.undo_buffers()
    seed_forward(micro_batch.forward_key, job.world.device)
    found: dict[str, Any] = {
        "rank": job.world.rank,
        "host": job.world.host,
        "pid": os.getpid(),
        "micro_batch": micro_batch.index,
        "samples": micro_batch.indices.tolist(),
    }
    _, loss, _ = forward(job, batch)
    named = {
        name: parameter
        for name, parameter in job.model.named_parameters()
        if parameter.requires_grad
    }
    # Not backward(): with batch_norm=sync other micro-batches are in flight and would add to the same gradients.
    scale = micro_batch.weight * job.progress.loss_scale
    gradients = torch.autograd.grad(loss * scale, [*named.values()], allow_unused=True)
    sizes = {
        name: float(gradient.abs().max()) / scale
        for name, gradient in zip(named, gradients, strict=True)
        if gradient is not None
    }
    # NaN ranks above infinity, since it is more informative. `max` alone cannot order it.
    worst = max(sizes, key=lambda name: (math.isnan(sizes[name]), sizes[name]))
    is_finite = math.isfinite(loss.item()) and all(map(math.isfinite, sizes.values()))
    return found | {
        "loss": loss.item(),
        "largest_name": worst,
        "largest": sizes[worst],
        "is_finite": is_finite,
    }
