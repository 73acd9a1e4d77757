"""Names of further validation sets, and of their metrics: "night.top1" is the top-1 accuracy on the set "night"."""

import re
from collections.abc import Iterable, Mapping

from samebits.errors import ConfigError
from samebits.report.format import metrics_line

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


def check_set_names(names: Iterable[str], where: str) -> None:
    """Check the names of validation sets; `where` has them."""
    for name in names:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"the name of a validation set is {name!r}",
                where=where,
                allowed="up to 32 letters, digits, _ and -, beginning with a letter",
                fix="Rename the set.",
            )


def with_set(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a validation set under their full names; "" is `eval_data`, whose names stay."""
    return {f"{name}.{metric}" if name else metric: value for metric, value in metrics.items()}


def metrics_of(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of one validation set of all, by their names without the set."""
    return {
        each.removeprefix(f"{name}."): value
        for each, value in metrics.items()
        if each.startswith(f"{name}.")
    }


def describe_set(name: str, metrics: Mapping[str, float], num_samples: int) -> str:
    """Return a line on a validation set for the console, from its metrics by their names without it."""
    return f"  {name} ({num_samples:,} samples)  {metrics_line(metrics)}"
