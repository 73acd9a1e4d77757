"""Comparison of a replay with the record: of a step's values, of metrics, and of tensors, each by its bits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from samebits.bits import first_element
from samebits.provenance.step_log import StepRecord

# What is compared, and the attribute of `StepRecord`. What a step reads comes before what follows from it.
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
    """The first difference of a segment."""

    step: int  #: The step, from 0; for weights and metrics, the number of steps done.
    name: str  #: What differs: loss, gradient norm, learning rate, samples, content, outcome, a metric, or a tensor.
    recorded: str  #: The value in the run's record.
    replayed: str  #: The value of the replay.


def compare_step(recorded: StepRecord | None, replayed: StepRecord) -> Difference | None:
    """Return the first value of a step that differs; None if all are equal, or nothing is recorded."""
    # By bytes, since NaN is not equal to itself.
    if recorded is None or recorded.to_bytes() == replayed.to_bytes():
        return None
    for name, attribute in NAMES.items():
        before, now = getattr(recorded, attribute), getattr(replayed, attribute)
        if _text(before) != _text(now):
            return Difference(replayed.step, name, _text(before), _text(now))
    return None


def compare_metrics(
    step: int, recorded: Mapping[str, float | None], replayed: Mapping[str, float]
) -> Difference | None:
    """Return the first metric that differs.

    Args:
        recorded: Metrics by name; None for a value that is not finite, as in `metrics.jsonl`.
    """
    # JSON has no NaN and no infinity, so the record has None for them.
    now = {name: value if math.isfinite(value) else None for name, value in replayed.items()}
    for name in sorted(recorded.keys() | now.keys()):
        if recorded.get(name) != now.get(name):
            return Difference(step, f"metric {name}", repr(recorded.get(name)), repr(now.get(name)))
    return None


def _text(value: float | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def compare_tensors(step: int, recorded: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> Difference | None:
    """Return the first tensor, in the order of the replay's names, that differs in a bit.

    Args:
        recorded: Tensors of any shape by name, on the CPU.
        replayed: Tensors of any shape by name.
    """
    for name in [*replayed, *(name for name in recorded if name not in replayed)]:
        before, now = recorded.get(name), replayed.get(name)
        if before is None or now is None:
            return Difference(
                step, f"tensor {name}", "none" if before is None else "present", "none" if now is None else "present"
            )
        if (element := first_element([before], [now])) is not None:
            where = element.index if element.is_value else ""
            return Difference(step, f"tensor {name}{where}", element.a, element.b)
    return None
