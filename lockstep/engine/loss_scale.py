"""Scales the loss in fp16, so that small gradients do not become zero (`loss_scale`).

The constants of the dynamic loss scale are those of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.schema import RunConfig
from lockstep.engine.job import Progress

INIT_SCALE, MIN_SCALE, GROWTH_INTERVAL = 2.0**16, 1.0, 2000


def init_scale(config: RunConfig) -> float:
    """The loss scale that a run begins with; 1 where there is none."""
    if config.precision != "fp16":
        return 1.0
    return INIT_SCALE if config.loss_scale == "dynamic" else float(config.loss_scale)


def update_scale(progress: Progress, config: RunConfig, loss: Sequence[float], *, is_finite: bool) -> bool:
    """Move a dynamic loss scale on after a step, on all ranks alike, as they hold the same sums.

    After an overflow it is halved, after 2,000 steps without one it is doubled.

    Args:
        progress: Holds the scale.
        config: The settings.
        loss: The terms of the loss, the mean over the step.
        is_finite: Whether they and the gradient were finite.

    Returns:
        Whether the step is to be left out because of an overflow that a smaller scale can cure. A loss that is not
        finite is no such thing, nor is a gradient at the smallest scale.
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
