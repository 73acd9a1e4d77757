"""The metric protocol, and a recipe's metric from a function or from objects of torchmetrics."""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from samebits.data.samples import Batch, to_cpu
from samebits.errors import ConfigError

# The metric protocol: add outputs, merge the state of another rank, return values by name.


class Metric(Protocol):
    """Counts over evaluated samples. `merge` must be exact: equal results however samples are split over ranks.

    A metric may also have `warnings() -> list[str]`: one sentence for each sign that the model learns nothing. The run
    prints them after the last validation, and once before it in the second half of the run.
    """

    @property
    def num_samples(self) -> int:
        """Number of samples added, merged ones included."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the model's outputs for one batch."""

    def state(self) -> dict[str, Any]:
        """Return the counts for `merge`, as plain numbers, strings, lists and dicts."""

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""

    def result(self) -> dict[str, float]:
        """Return the values by name."""


# torchmetrics objects as the metric of a recipe, merged exactly over ranks through their states.
#
# Each batch is counted into a fresh state, so what the ranks exchange does not depend on which rank has which batches:
#
#     integer states that are summed; minima and maxima    folded at once: exact in any order
#     float states that are summed                         kept for each batch, and summed in the order of the samples
#
# Other states, such as lists of all predictions, are refused by name.


_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add, "dim_zero_min": torch.minimum, "dim_zero_max": torch.maximum,
}  # fmt: skip
_WAYS = "Choose a form of the metric that counts (such as thresholds=100), or write a metric of your own."

_OWN = "Set full_state_update = False in its class, if no update depends on earlier batches; or choose another metric."


def is_torchmetrics(value: object) -> bool:
    """Return whether a value is a metric or collection of torchmetrics, or a dict of metrics by name."""
    package = sys.modules.get("torchmetrics")  # without it, there are no such objects
    if package is None:
        return False
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(each, package.Metric) for each in value.values())
    return isinstance(value, package.Metric | package.MetricCollection)


class TorchMetrics:
    """A `Metric` of torchmetrics objects, which are updated with (outputs, batch.targets).

    Args:
        source: A metric, whose value is named by its class; a MetricCollection; or a dict of metrics by name.

    Raises:
        ConfigError: A metric has a state that does not merge exactly.
    """

    def __init__(self, source: Any) -> None:
        if isinstance(source, Mapping):
            named = dict(source)
        elif hasattr(
            source, "items"
        ):  # a collection; its metrics are independent until its own update
            named = dict(source.items(copy_state=False))
        else:
            named = {type(source).__name__: source}
        #: The metrics by name; after `result`, with the states of all samples.
        # Copies: the recipe's own objects are given again for each validation, and have to stay empty.
        self.metrics: dict[str, Any] = {
            name: copy.deepcopy(metric) for name, metric in named.items()
        }
        self._states = {name: _States(name, metric) for name, metric in self.metrics.items()}
        self.num_samples = 0

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the outputs for one batch, (N, ...) tensors as the metrics expect them."""
        place = int(batch.indices[0])
        near = to_cpu(outputs), to_cpu(batch.targets)
        for states in self._states.values():
            states.add(place, *near)
        self.num_samples += len(batch)

    def state(self) -> dict[str, Any]:
        """Return the states, as lists of numbers."""
        return {
            "num_samples": self.num_samples,
            "metrics": {name: states.plain() for name, states in self._states.items()},
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the states of another rank, from its `state`."""
        for name, states in self._states.items():
            states.merge(state["metrics"][name])
        self.num_samples += state["num_samples"]

    def result(self) -> dict[str, float]:
        """Return the values by name; those of a metric with several values as NAME/0, NAME/1 or NAME/KEY."""
        values: dict[str, float] = {}
        for name, states in self._states.items():
            values |= dict(_flat(name, states.compute()))
        return values


class _States:
    """The states of one metric. `metric`: a torchmetrics.Metric; changed."""

    def __init__(self, name: str, metric: Any) -> None:
        self._metric = metric.to("cpu")
        metric.sync_on_compute = metric._to_sync = (
            False  # rank 0 alone computes, with the states of all ranks
        )
        metric.reset()
        # torchmetrics has no public names for a metric's states, their initial values and how they are merged.
        self._folds = {state: _fold(name, metric, state) for state in metric._defaults}
        if not self._folds:
            raise _refused(
                name,
                metric,
                "it has no states of its own",
                "Name the metrics that it wraps instead.",
            )
        if metric.full_state_update is not False:
            raise _refused(name, metric, "it has full_state_update", _OWN)
        self._folded: dict[str, Tensor] = {}
        self._by_batch: dict[str, dict[int, Tensor]] = {}
        self._num_updates = 0

    def add(self, place: int, outputs: Any, targets: Any) -> None:
        self._metric.reset()
        self._metric.update(outputs, targets)
        for state in self._folds:
            # A copy, since the next update changes the state in place.
            self._put(state, place, getattr(self._metric, state).detach().clone())
        self._num_updates += 1

    def _put(self, state: str, place: int, value: Tensor) -> None:
        if self._folds[state] is torch.add and value.is_floating_point():
            self._by_batch.setdefault(state, {})[place] = value
        else:
            so_far = self._folded.get(state)
            self._folded[state] = value if so_far is None else self._folds[state](so_far, value)

    def plain(self) -> dict[str, Any]:
        return {
            "num_updates": self._num_updates,
            "folded": {state: _plain(value) for state, value in self._folded.items()},
            "by_batch": {
                state: [[place, _plain(value)] for place, value in values.items()]
                for state, values in self._by_batch.items()
            },
        }

    def merge(self, plain: Mapping[str, Any]) -> None:
        self._num_updates += plain["num_updates"]
        for state, value in plain["folded"].items():
            self._put(state, 0, _tensor(value))
        for state, rows in plain["by_batch"].items():
            for place, value in rows:
                self._put(state, place, _tensor(value))

    def compute(self) -> Any:
        metric = self._metric
        metric.reset()
        for state, value in self._folded.items():
            setattr(metric, state, value.to(metric._defaults[state].dtype))
        for state, values in self._by_batch.items():
            # In the order of the samples and in float64, so that the sum does not depend on which rank had which batch.
            total = torch.stack([values[place].double() for place in sorted(values)]).sum(dim=0)
            setattr(metric, state, total.to(metric._defaults[state].dtype))
        # compute() warns if there was no update, and merged states count as updates.
        metric._update_count = self._num_updates
        return metric.compute()


def _fold(name: str, metric: Any, state: str) -> Callable[[Tensor, Tensor], Tensor]:
    default = metric._defaults[state]
    reduction = metric._reductions[state]
    kind = getattr(reduction, "__name__", "none" if reduction is None else "of its own")
    if isinstance(default, list):
        raise _refused(name, metric, f"its state {state} is a list of all predictions", _WAYS)
    if kind not in _FOLDS:
        raise _refused(
            name,
            metric,
            f"its state {state} has the reduction {kind.removeprefix('dim_zero_')}",
            _WAYS,
        )
    if kind == "dim_zero_sum" and bool(default.any()):
        raise _refused(name, metric, f"its state {state} is summed and does not start at 0", _WAYS)
    return _FOLDS[kind]


def _refused(name: str, metric: Any, why: str, fix: str) -> ConfigError:
    kind = type(metric).__name__
    return ConfigError(
        f"the metric {kind} of torchmetrics does not merge exactly: {why}",
        where="Parts.metric" if name == kind else f"Parts.metric, {name}",
        allowed="states with the reductions sum, min and max",
        fix=fix,
    )


def _plain(value: Tensor) -> list[Any]:
    return [str(value.dtype).removeprefix("torch."), value.tolist()]


def _tensor(plain: list[Any]) -> Tensor:
    return torch.tensor(plain[1], dtype=getattr(torch, plain[0]))


def _flat(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [pair for key, each in value.items() for pair in _flat(f"{name}/{key}", each)]
    tensor = torch.as_tensor(value).flatten()
    if tensor.numel() == 1:
        return [(name, float(tensor))]
    return [(f"{name}/{place}", number) for place, number in enumerate(tensor.double().tolist())]


# Make a recipe's metric from what `Parts.metric` is: a function, or objects of torchmetrics.


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
            fix="\n".join(
                ["Add", *(f"  {_MEMBERS[name]}" for name in missing), "or use samebits.Accuracy."]
            ),
        )
    if inspect.isroutine(metric.num_samples):
        raise ConfigError(
            f"num_samples of the metric {type(metric).__name__} is a method",
            where="Parts.metric",
            fix="Put @property above it, or set self.num_samples.",
        )
    return metric  # type: ignore[no-any-return]  # it has the members of a Metric, as just checked
