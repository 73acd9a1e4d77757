"""Values on the use of a run's devices for its training records."""

import logging

from samebits.data.samples import groups_of
from samebits.data.seeding import seeded
from samebits.engine.build import first_inputs
from samebits.engine.job import Job
from samebits.module.flops import training_flops
from samebits.report.device_use import DeviceUse

LOGGER = logging.getLogger("samebits")


class DeviceRecords:
    """Reads the use of rank 0's device, and computes the MFU of all ranks."""

    def __init__(self, job: Job) -> None:
        self._use = DeviceUse(job.world.device, job.config.precision, job.config.report.peak_tflops)
        self._num_devices = job.world.size
        # Counted only where the peak is known: it can take seconds.
        self._flops_per_sample = flops_per_sample(job) if self._use.peak is not None else None

    def values(self, samples_per_s: float) -> dict[str, float | None]:
        """Return the values of a record, by name; None if they are not known."""
        flops = self._flops_per_sample
        return self._use.values(None if flops is None else flops * samples_per_s, self._num_devices)


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
