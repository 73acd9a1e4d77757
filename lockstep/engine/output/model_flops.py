"""FLOPs of a run's model per sample, for its MFU."""

from __future__ import annotations

import logging

import numpy as np

from lockstep.data.groups import groups_of
from lockstep.data.keyed import keys, seeded
from lockstep.data.loader import read
from lockstep.data.samples import as_samples
from lockstep.engine.job import Job
from lockstep.module.flops import training_flops

LOGGER = logging.getLogger("lockstep")


def flops_per_sample(job: Job) -> float | None:
    """Count the FLOPs of training on one sample; None if samples differ in size, or the model cannot be counted.

    Reads one training sample. Random generators and the model stay as they are.
    """
    if job.replica.is_sharded or groups_of(job.train_data) is not None:
        return None
    config = job.config
    try:
        with seeded(config.seed):
            first = np.zeros(1, dtype=np.int64)
            batch = read(job.train_data, first, keys(0, 0, first))
            finish = as_samples(job.train_data).finish
            inputs = (batch if finish is None else finish(batch)).inputs
            recomputes = bool(config.activation_checkpointing)
            return training_flops(job.model, inputs, config.micro_batch, recomputes=recomputes) / config.micro_batch
    except Exception:
        LOGGER.info("the model's FLOPs could not be counted, so mfu is null", exc_info=True)
        return None
