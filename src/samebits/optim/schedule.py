"""Learning-rate schedules: (step, settings) -> factor of the peak learning rate. Pure, hence without state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from samebits.portable import floats

if TYPE_CHECKING:
    from samebits.config.schema import OptimConfig

# Of a run. A preset's warmup of two epochs would otherwise be the whole of a run of two epochs, which would end at the
# peak learning rate and never train at lower ones.
MAX_WARMUP = 0.5


def factor(step: int, num_steps: int, steps_per_epoch: int, config: OptimConfig) -> float:
    """Return the factor of the peak learning rate in a step, from 0 to num_steps - 1.

    Linear warmup replaces the first steps of the schedule, at most half of them. The later ones are the same with and
    without it, except with `warmup_cosine`, whose cosine begins at the end of the warmup.
    """
    done = step / max(1, num_steps - 1)
    num_warmup = num_warmup_steps(num_steps, steps_per_epoch, config)
    if step < num_warmup:
        if config.warmup_factor is not None:
            return config.warmup_factor + (1 - config.warmup_factor) * step / num_warmup
        return (step + 1) / (math.ceil(num_warmup) + 1)
    if config.schedule == "warmup_cosine":
        # As in torchvision's reference training: the cosine begins where the warmup ends.
        return _cosine(
            1.0, config.final_factor, (step - num_warmup) / max(1, num_steps - 1 - num_warmup)
        )
    if config.schedule == "cosine":
        return _cosine(1.0, config.final_factor, done)
    if config.schedule == "one_cycle":
        # Smith and Topin, "Super-Convergence", 2018, with half a cosine up to the peak and another one down, as in
        # torch's OneCycleLR.
        if done < config.peak_at:
            return _cosine(config.start_factor, 1.0, done / config.peak_at)
        return _cosine(
            1.0, config.final_factor, (done - config.peak_at) / max(1e-12, 1 - config.peak_at)
        )
    if config.schedule == "multi_step":
        num_reached = sum(step >= milestone * steps_per_epoch for milestone in config.milestones)
        return floats.power(config.gamma, num_reached)
    return 1.0


def num_warmup_steps(num_steps: int, steps_per_epoch: int, config: OptimConfig) -> float:
    """Return the number of warmup steps, with a fraction: those of the settings, but at most half of the run."""
    return min(config.warmup_epochs * steps_per_epoch, MAX_WARMUP * num_steps)


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + floats.cos(math.pi * share)) / 2
