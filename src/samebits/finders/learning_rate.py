"""Learning-rate range test: one short training in which the rate grows by a constant factor per step.

Smith, "Cyclical Learning Rates for Training Neural Networks", 2017. A step's loss is the mean over the global batch,
summed in the micro-batch tree. In exact mode, curve and suggestion are therefore equal bit for bit at any number of
processes.
"""

import math
from collections.abc import Sequence
from typing import Any

from samebits.bench.bench import advance, opened
from samebits.engine.job import Job

# The test ends when the smoothed loss is so many times the lowest one.
DIVERGED = 4.0
_SMOOTHING = 0.9
_LEAST_FALL = 0.05  # of the loss: less is noise


def rates(first: float, last: float, num: int) -> list[float]:
    """Return learning rates with a constant ratio."""
    return [first * (last / first) ** (index / (num - 1)) for index in range(num)]


def smooth(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average of the losses, corrected for its start."""
    smoothed = []
    average = 0.0
    for index, loss in enumerate(losses):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smoothed.append(average / (1 - _SMOOTHING ** (index + 1)))
    return smoothed


def suggest(learning_rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate at which the loss falls fastest, before its minimum.

    Args:
        learning_rates: The rates, with a constant ratio.
        losses: The loss of each, before the step.

    Returns:
        The rate with two significant digits; None if the loss did not fall clearly.
    """
    half = max(2, len(losses) // 20)
    # Means around each step: an average over earlier steps alone would lag behind.
    windows = [losses[max(0, index - half) : index + half + 1] for index in range(len(losses))]
    curve = [math.fsum(window) / len(window) for window in windows]
    if not curve or min(curve) > (1 - _LEAST_FALL) * curve[0]:
        return None
    lowest = curve.index(min(curve))
    slopes = {index: curve[index + 1] - curve[index - 1] for index in range(1, lowest)}
    if not slopes:
        return None
    return float(f"{learning_rates[min(slopes, key=lambda index: slopes[index])]:.2g}")


def measure(source: str, overrides: list[str], learning_rates: list[float]) -> dict[str, Any]:
    """Train one step per rate as one process of a world.

    Returns:
        "lr" and "loss" of each step that was taken; equal on all ranks.
    """
    with opened(source, overrides) as bench:
        job = bench.start()
        with job.compiling():
            losses = _train(job, learning_rates)
    return {"lr": learning_rates[: len(losses)], "loss": losses}


def _train(job: Job, learning_rates: Sequence[float]) -> list[float]:
    """Train until the loss diverges, the same step on all ranks: they have equal losses."""
    config = job.config
    loader, steps = job.open_loader(stop=len(learning_rates))
    losses: list[float] = []
    try:
        for step, lr in zip(steps, learning_rates, strict=False):
            # Neither scaled by the batch nor warmed up: each step has exactly its rate.
            constant = {
                "lr": lr,
                "lr_for_batch": None,
                "schedule": "constant",
                "warmup_epochs": 0.0,
            }
            job.config = config.model_copy(
                update={"optim": config.optim.model_copy(update=constant)}
            )
            result = advance(job, step, loader)
            if result.is_overflow and losses:  # fp16's loss scale was too large, not the rate
                losses.append(losses[-1])
                continue
            if not math.isfinite(result.loss):
                break
            losses.append(result.loss)
            curve = smooth(losses)
            if curve[-1] > DIVERGED * min(curve):
                break
    finally:
        job.config = config
        loader.close()
    return losses
