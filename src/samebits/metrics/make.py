"""Make a recipe's metric from what `Parts.metric` is: a function, or objects of torchmetrics."""

import inspect
from typing import Any

from samebits.errors import ConfigError
from samebits.metrics.from_torchmetrics import TorchMetrics, is_torchmetrics
from samebits.metrics.metric import Metric

_MEMBERS = {
    "num_samples": "num_samples, a property: the number of samples added, merged ones included",
    "add": "add(outputs, batch): count the outputs of one batch",
    "state": "state(): the counts, as plain numbers, strings, lists and dicts",
    "merge": "merge(state): add the counts of another rank",
    "result": "result(): the values by name",
}


def make_metric(given: Any) -> Metric:
    """Make an empty metric of `Parts.metric`, whose members exist.

    Raises:
        ConfigError: It is no such function, or its metric lacks a member.
    """
    if not is_torchmetrics(given) and not callable(given):
        raise ConfigError(
            f"the recipe's metric is a {type(given).__name__}, not a function",
            where="Parts.metric",
            fix=f"Set metric=lambda: {type(given).__name__}(...), which makes an empty one.",
        )
    metric = given if is_torchmetrics(given) else given()
    if is_torchmetrics(metric):
        return TorchMetrics(metric)
    missing = [name for name in _MEMBERS if not hasattr(metric, name)]
    if missing:
        raise ConfigError(
            f"the metric {type(metric).__name__} has no {' and no '.join(missing)}",
            where="Parts.metric",
            fix="\n".join(["Add", *(f"  {_MEMBERS[name]}" for name in missing), "or use samebits.Accuracy."]),
        )
    if inspect.isroutine(metric.num_samples):
        raise ConfigError(
            f"num_samples of the metric {type(metric).__name__} is a method",
            where="Parts.metric",
            fix="Put @property above it, or set self.num_samples.",
        )
    return metric  # type: ignore[no-any-return]  # it has the members of a Metric, as just checked
