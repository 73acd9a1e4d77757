"""What a run's notices name as the way to better training, and the FLOPs of a sample for its records."""

import logging
from typing import Any

from samebits.config.schema import RunConfig
from samebits.cores import num_cores
from samebits.data.samples import groups_of
from samebits.data.seeding import seeded
from samebits.engine.build import first_inputs
from samebits.engine.job import Job
from samebits.module.flops import training_flops
from samebits.report.bottleneck import advice

LOGGER = logging.getLogger("samebits")


def flops_per_sample(job: Job) -> float | None:
    """Count the FLOPs of training on one sample; None if samples differ in size, or the model cannot be counted.

    Reads one training sample. Random generators and the model stay as they are.
    """
    if job.replica.is_sharded or groups_of(job.train_data) is not None:
        return None
    config = job.config
    try:
        # Counting reads a sample, whose augmentations must not advance the run's generators.
        with seeded(config.seed):
            inputs = first_inputs(job.train_data)
            recomputes = bool(config.activation_checkpointing)
            return training_flops(job.model, inputs, config.micro_batch, recomputes=recomputes) / config.micro_batch
    # The model may be a user's. Training continues without the MFU.
    except Exception:
        LOGGER.info("the model's FLOPs could not be counted, so mfu is null", exc_info=True)
        return None


def warnings_of(metric: Any) -> list[str]:
    """Return the warnings of a recipe's metric about what the model predicts."""
    try:
        return [str(text) for text in metric.warnings()] if callable(getattr(metric, "warnings", None)) else []
    except Exception:  # the metric may be a user's; training continues without its warnings
        LOGGER.exception("the warnings of %s", type(metric).__name__)
        return []


def load_faster(job: Job) -> str:
    """Return what to do when data loading is the bottleneck."""
    data: Any = getattr(job.config, "data", None)
    return advice(
        num_workers=job.loader.num_workers if job.loader is not None else 0,
        num_free_cores=num_cores() // job.world.num_ranks_here - 1,
        can_cache=hasattr(data, "cache") and data.cache is None,
    )


def lower_lr(config: RunConfig) -> str:
    """Return what to do when the loss grows."""
    ways = f"Lower optim.lr (now {config.optim.lr:g})"
    return f"{ways}, or set optim.warmup_epochs." if config.optim.warmup_epochs == 0 else f"{ways}."


def learn_more(config: RunConfig) -> str:
    """Return what to do when the model has not learned."""
    length = f"epochs is {config.epochs:,}" if config.max_steps is None else f"max_steps is {config.max_steps:,}"
    return f"Train longer ({length}), or choose optim.lr (now {config.optim.lr:g}) with samebits find lr."
