"""One optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.cluster.pulse import COMPUTING, READING
from lockstep.data.loader import Loader
from lockstep.data.order import MicroBatch, Step
from lockstep.data.samples import Batch
from lockstep.engine.job import MAX_TERMS, Job
from lockstep.engine.precision import adapt_scale
from lockstep.errors import ConfigError
from lockstep.optim.schedule import factor


@dataclass(frozen=True)
class StepResult:
    """What one step gave, equal on all ranks.

    Attributes:
        loss: Mean over the step's samples, before the update.
        terms: The loss's named terms; the names are known on ranks that ran a micro-batch.
        norm: 2-norm of the gradient, before clipping.
        lr: Learning rate.
        is_finite: Whether loss and gradient were finite. If not, the step changed nothing.
        is_overflow: Whether they were not because of fp16's loss scale, which is smaller now.
        flag: What rank 0 told all.
    """

    loss: float
    terms: dict[str, float]
    norm: float
    lr: float
    is_finite: bool
    is_overflow: bool
    flag: float


def run_step(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
    """Forward and backward for this process's micro-batches, the sum over the world, and the update.

    Args:
        job: The run; its model and optimizer change.
        step: The step's plan for this process.
        loader: Gives the micro-batches' samples.
        flag: Rank 0's is given to all ranks, with the gradients.
    """
    optim = job.config.optim
    lr = job.config.peak_lr * factor(step.number, job.num_steps, job.order.steps_per_epoch, optim)
    names: list[str] = []
    pulse = job.world.pulse

    def run_micro_batch(micro_batch: MicroBatch) -> None:
        nonlocal names
        pulse.enter(READING)
        batch = loader.batch(micro_batch.indices, micro_batch.keys)
        pulse.enter(COMPUTING, waits=job.shards is not None)  # a sharded model's layers wait for the other ranks
        with job.reducer.micro_batch(micro_batch):
            names, loss, terms = forward(job, batch)
            job.reducer.backward(loss, terms)

    pulse.begin_step(step.number, job.world.device)
    job.reducer.begin(step, job.progress.loss_scale)
    job.reducer.run(run_micro_batch)
    pulse.end_work(len(step.micro_batches))
    job.reducer.reduce(flag)
    pulse.end_wait()

    extras, norm = job.reducer.extras, job.reducer.norm
    is_finite = math.isfinite(norm) and all(map(math.isfinite, extras))
    is_overflow = adapt_scale(job.progress, job.config, extras, is_finite=is_finite)
    if is_finite:
        if optim.clip_norm is not None and norm > optim.clip_norm:
            job.reducer.scale(optim.clip_norm / norm)
        for group in job.optimizer.param_groups:
            group["lr"] = lr
        job.optimizer.step()
        if job.average is not None:
            job.average.update(step.number + 1)
    else:
        job.reducer.undo_buffers()
    terms_by_name = dict(zip(names, extras, strict=False))
    return StepResult(sum(extras), terms_by_name, norm, lr, is_finite, is_overflow, job.reducer.flag)


def forward(job: Job, batch: Batch) -> tuple[list[str], Tensor, Tensor]:
    """The forward pass: names of the loss's terms, their sum (0-d), and their values (MAX_TERMS,), detached."""
    try:
        outputs = (job.compiled or job.on_all_gpus or job.model)(batch.inputs)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            "batch norm can't work with a micro-batch of one sample whose maps have come down to one pixel",
            given=f"global_batch={job.config.global_batch}, micro_batch={job.config.micro_batch}: "
            f"an epoch of {job.order.num_samples:,} samples comes to such a micro-batch",
            do=f"global_batch={job.config.global_batch + 1}; or larger pictures, or batch_norm=sync",
        ) from None
    terms = job.parts.loss(outputs, batch)
    if not isinstance(terms, Mapping):
        raise ConfigError(
            f"the recipe's loss gave a {type(terms).__name__}, not a dict of named terms", do='return {"loss": ...}'
        )
    if not 0 < len(terms) <= MAX_TERMS:
        raise ConfigError(
            f"the recipe's loss gave {len(terms)} terms", allowed=f"1 to {MAX_TERMS}", do="add some up, or give one"
        )
    for name, term in terms.items():
        if not isinstance(term, Tensor):
            raise ConfigError(
                f"the recipe's loss gave {name} as a {type(term).__name__}, not a tensor", do="give what torch computed"
            )
        if term.dim() != 0:
            raise ConfigError(
                f"the recipe's loss gave {name} of shape {tuple(term.shape)}, not one number",
                do="give the mean over the batch's samples",
            )
    values = torch.stack([term.float() for term in terms.values()])
    return list(terms), values.sum(), F.pad(values.detach(), (0, MAX_TERMS - len(values)))
