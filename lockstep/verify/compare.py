"""Comparison of recorded with replayed values, by their bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.provenance.step_log import StepRecord

# What is compared of a step, and the attribute of `StepRecord`. What a step reads comes before what follows from it.
NAMES = {
    "samples": "samples",
    "samples' values": "content",
    "learning rate": "lr",
    "loss": "loss",
    "gradient norm": "norm",
    "outcome": "outcome",
}


@dataclass(frozen=True)
class Difference:
    """The first difference of a segment.

    Attributes:
        step: The step, from 0; for weights and metrics, the number of steps done.
        name: What differs: loss, gradient norm, learning rate, samples, content, outcome, a metric, or a tensor.
        recorded: The value in the run's record.
        replayed: The value of the replay.
    """

    step: int
    name: str
    recorded: str
    replayed: str


def compare_steps(recorded: StepRecord | None, replayed: StepRecord) -> Difference | None:
    """Return the first value of a step that differs; None if the step has no record."""
    if recorded is None or recorded.to_bytes() == replayed.to_bytes():
        return None
    for name, attribute in NAMES.items():
        before, now = _text(getattr(recorded, attribute)), _text(getattr(replayed, attribute))
        if before != now:
            return Difference(replayed.step, name, before, now)
    return None


def compare_metrics(
    step: int, recorded: Mapping[str, float | None], replayed: Mapping[str, float]
) -> Difference | None:
    """Return the first metric, by name, that differs.

    Args:
        step: Number of steps done.
        recorded: Metrics as in `metrics.jsonl`, where one that is not finite is None.
        replayed: Metrics of the replay.
    """
    for name in sorted(recorded.keys() | replayed.keys()):
        value = replayed.get(name)
        before, now = recorded.get(name), value if value is not None and math.isfinite(value) else None
        if before != now:
            return Difference(step, f"metric {name}", repr(before), repr(now))
    return None


def compare_tensors(step: int, recorded: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> Difference | None:
    """Return the first tensor, in the order of the replay's names, that differs in a bit.

    Args:
        step: Number of steps done.
        recorded: Tensors of any shape on the CPU, by name.
        replayed: Those of the replay, on any device.
    """
    for name in [*replayed, *(name for name in recorded if name not in replayed)]:
        before, now = recorded.get(name), replayed.get(name)
        if before is None or now is None:
            return Difference(
                step, f"tensor {name}", "none" if before is None else "present", "none" if now is None else "present"
            )
        now = now.detach().cpu()
        if before.dtype != now.dtype or before.shape != now.shape:
            return Difference(step, f"tensor {name}", _kind(before), _kind(now))
        # In bytes: NaN would differ from itself, and 0.0 equals -0.0.
        unequal = _bytes(before) != _bytes(now)
        if bool(unequal.any()):
            element = int(unequal.nonzero()[0]) // now.element_size()
            index = tuple(int(axis) for axis in np.unravel_index(element, now.shape)) if now.dim() else ()
            return Difference(step, f"tensor {name}{list(index)}", repr(before[index].item()), repr(now[index].item()))
    return None


def compare_plain(
    step: int, recorded: Mapping[str, Any], replayed: Mapping[str, Any], names: tuple[str, ...]
) -> Difference | None:
    """Return the first of some named plain values that differs.

    Args:
        step: Number of steps done.
        recorded: The values in the run's record.
        replayed: The values of the replay.
        names: Which ones to compare.
    """
    for name in names:
        before, now = recorded.get(name), replayed.get(name)
        if before != now:
            return Difference(step, name.replace("_", " "), repr(before), repr(now))
    return None


def _text(value: float | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
