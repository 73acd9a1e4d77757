"""Notices about a training that does not learn, with what to change."""

import logging
from typing import Any

from samebits.config.schema import RunConfig
from samebits.report.loss_trend import LossTrend

LOGGER = logging.getLogger("samebits")
_MIN_EVALUATIONS = 3  # before a notice within a run


class Quality:
    """Collects the warnings of the recipe's metric, at most once before the last validation."""

    def __init__(self, num_steps: int) -> None:
        self.trend = LossTrend(num_steps)  #: Whether the training loss grows.
        self._num_evaluations = 0
        self._is_said = False

    def notices(self, metric: Any, step: int, num_steps: int, *, is_last: bool) -> list[str]:
        """Return the warnings of a metric, if they are due."""
        self._num_evaluations += 1
        warn = getattr(metric, "warnings", None)
        is_early = not self._is_said and is_telling(step, num_steps, self._num_evaluations)
        if not callable(warn) or not (is_last or is_early):
            return []
        try:
            texts = [str(text) for text in warn()]
        except Exception:  # the metric may be a user's; training continues without its warnings
            LOGGER.exception("the warnings of %s", type(metric).__name__)
            return []
        self._is_said = self._is_said or bool(texts)
        return texts


def is_telling(step: int, num_steps: int, num_evaluations: int) -> bool:
    """Return whether poor results within a run are worth a notice: at the start, all results are poor."""
    return 2 * step >= num_steps and num_evaluations >= _MIN_EVALUATIONS


def lower_lr(config: RunConfig) -> str:
    """Return what to do when the loss grows."""
    ways = f"Lower optim.lr (now {config.optim.lr:g})"
    return f"{ways}, or set optim.warmup_epochs." if config.optim.warmup_epochs == 0 else f"{ways}."


def learn_more(config: RunConfig) -> str:
    """Return what to do when the model has not learned."""
    length = f"epochs is {config.epochs:,}" if config.max_steps is None else f"max_steps is {config.max_steps:,}"
    return f"Train longer ({length}), or choose optim.lr (now {config.optim.lr:g}) with samebits find lr."
