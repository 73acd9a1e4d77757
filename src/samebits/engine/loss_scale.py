"""Loss scaling in fp16, which keeps small gradients from underflowing to zero (`loss_scale`).

The constants of the dynamic loss scale are those of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Sequence

from samebits.config.schema import RunConfig
from samebits.engine.job import Progress

INIT_SCALE, MIN_SCALE, GROWTH_INTERVAL = 2.0**16, 1.0, 2000


def init_scale(config: RunConfig) -> float:
    """Return the initial loss scale; 1 without fp16."""
    if config.precision != "fp16":
        return 1.0
    return INIT_SCALE if config.loss_scale == "dynamic" else float(config.loss_scale)


def update_scale(progress: Progress, config: RunConfig, loss: Sequence[float], *, is_finite: bool) -> bool:
    """Update the dynamic loss scale after a step: halve it after an overflow, double it after 2,000 steps without one.

    All ranks compute the same update, since they have the same sums.

    Args:
        progress: The run's progress, which holds the scale.
        config: The settings.
        loss: The loss terms, each the mean over the step's samples.
        is_finite: Whether loss and gradient are finite.

    Returns:
        Whether to skip the step because of an overflow that a smaller scale can avoid. False if the loss itself is not
        finite, or if the scale is already the smallest.
    """
    if config.precision != "fp16" or config.loss_scale != "dynamic":
        return False
    if is_finite:
        progress.scale_age += 1
        if progress.scale_age == GROWTH_INTERVAL:
            progress.loss_scale, progress.scale_age = progress.loss_scale * 2, 0
        return False
    if progress.loss_scale <= MIN_SCALE or not all(map(_is_finite, loss)):
        return False
    progress.loss_scale, progress.scale_age = progress.loss_scale / 2, 0
    progress.num_overflows += 1
    return True


def _is_finite(value: float) -> bool:
    return -float("inf") < value < float("inf")
