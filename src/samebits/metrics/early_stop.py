"""Early stopping: the run ends when validations no longer improve (`stop_early`).

The decision is a function of the validations so far, whose metrics are equal on all ranks and in every world. All ranks
therefore stop after the same step without an exchange, and a resumed run stops where an undisturbed one does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.report.format import is_lower_better

if TYPE_CHECKING:
    from samebits.config.schema import StopEarlyConfig


@dataclass(frozen=True)
class Patience:
    """What early stopping remembers of the validations so far."""

    best: float | None = None  #: Best value so far; None before the first.
    num_stale: int = 0  #: Number of validations since then.

    def after(self, value: float, sign: float, config: StopEarlyConfig) -> Patience:
        """Return what is remembered after one more validation; `sign`: 1 if larger values are better, else -1."""
        # NaN never is the best: every comparison with it is false, so no later value could replace it.
        is_better = not math.isnan(value) and (
            self.best is None or sign * value > sign * self.best + config.min_delta
        )
        return Patience(value, 0) if is_better else Patience(self.best, self.num_stale + 1)

    def is_over(self, config: StopEarlyConfig) -> bool:
        """Return whether training ends."""
        return config.patience is not None and self.num_stale >= config.patience


def metric_of(config: StopEarlyConfig, monitor: tuple[str, str]) -> tuple[str, float]:
    """Return the name of the metric, by default `monitor`, and 1 if larger values are better or else -1."""
    name, better = monitor
    if config.metric is not None:
        if config.better != "auto":
            better = config.better
        elif config.metric != name:
            better = "min" if is_lower_better(config.metric) else "max"
        name = config.metric
    return name, 1.0 if better == "max" else -1.0


def last_step(
    evaluations: Iterable[tuple[int, Mapping[str, float | None]]],
    config: StopEarlyConfig,
    monitor: tuple[str, str],
) -> int | None:
    """Return the step after which recorded validations, in order, end a run; None if they do not."""
    name, sign = metric_of(config, monitor)
    patience = Patience()
    for step, metrics in evaluations:
        value = metrics.get(name)
        patience = patience.after(math.nan if value is None else value, sign, config)
        if patience.is_over(config):
            return step
    return None
