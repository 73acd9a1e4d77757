"""Intervals between saves, evaluations or checks: "200 steps", "1 epoch", "30s"; and fractions such as "1/50"."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """An interval between saves or evaluations. Exactly one of the attributes is set."""

    steps: int | None = None  #: Optimizer steps.
    epochs: int | None = None  #: Whole epochs.
    seconds: float | None = None  #: Wall-clock time, seconds.

    def is_due(self, step: int, steps_per_epoch: int, elapsed_s: float) -> bool:
        """Return whether the interval ends at a step."""
        if self.steps is not None:
            return step % self.steps == 0
        if self.epochs is not None:
            return step % (self.epochs * steps_per_epoch) == 0
        assert self.seconds is not None
        return elapsed_s >= self.seconds


_INTERVAL = re.compile(r"(\d+(?:\.\d+)?)\s*(steps?|epochs?|s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
INTERVAL_FORMS = '"200 steps", "1 epoch", "30s", "5min" or "1h"'


def parse_interval(text: str) -> Interval:
    """Parse an interval such as "200 steps", "1 epoch", "30s", "5min" or "1h".

    Raises:
        ValueError: The text has none of these forms, or its number is zero or a fraction of steps or epochs.
    """
    match = _INTERVAL.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be like {INTERVAL_FORMS}")
    number, unit = match.groups()
    if float(number) == 0:
        raise ValueError("must be more than zero")
    if unit in _SECONDS:
        return Interval(seconds=float(number) * _SECONDS[unit])
    if "." in number:
        raise ValueError("must be a whole number of steps or epochs")
    return Interval(steps=int(number)) if unit.startswith("step") else Interval(epochs=int(number))


def parse_steps(text: str) -> tuple[int, int]:
    """Read a range of steps such as "10:13": steps 10, 11 and 12.

    Raises:
        ValueError: The text is no range, or an empty one.
    """
    match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError("must be like 10:13, with a first step and the step after the last one")
    return int(match[1]), int(match[2])
