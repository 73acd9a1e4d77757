"""torchmetrics in a LightningModule: states merged over the batches of an evaluation, in the order of the batches.

torchmetrics keeps one state on each rank, and adds them up over ranks in an order that depends on their number. Here
every batch is what a rank is there: its state starts empty, and torchmetrics' own reduction joins the states of all
batches. The metric then has that state on all ranks, and does not sum over ranks any more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from samebits.cluster import collectives
from samebits.cluster.world import World

State = dict[str, Any]  # name -> tensor of any shape, or list of tensors


class MetricStates:
    """The states of the metrics that a module has as submodules, by batch."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._world = world
        self._metrics = {name: each for name, each in module.named_modules() if isinstance(each, Metric)}
        self._before: dict[str, tuple[State, int]] = {}
        self._states: list[tuple[str, int, State, int]] = []

    @contextmanager
    def of_batch(self, index: int) -> Iterator[None]:
        """Take the states of what the block updates as those of a batch; other metrics keep theirs."""
        # torchmetrics has no public names for a metric's states, number of updates and cached result.
        before = {
            name: (_state(metric), metric._update_count, metric._computed) for name, metric in self._metrics.items()
        }
        for metric in self._metrics.values():
            for name, default in metric._defaults.items():
                device = metric.device
                # A copy of the default, since metrics change their states in place.
                setattr(metric, name, default.detach().clone().to(device) if isinstance(default, Tensor) else [])
            metric._update_count, metric._computed = 0, None
        try:
            yield
        finally:
            for name, metric in self._metrics.items():
                state, count, computed = before[name]
                if metric._update_count:
                    self._before.setdefault(name, (state, count))
                    self._states.append((name, index, _state(metric), metric._update_count))
                else:
                    _set(metric, state)
                    metric._update_count, metric._computed = count, computed

    def merge(self) -> None:
        """Merge the states of all ranks. Called on all ranks."""
        states, before, self._states, self._before = self._states, self._before, [], {}
        by_name: dict[str, list[tuple[int, State, int]]] = {}
        for own in collectives.all_gather_object(self._world, states):
            for name, index, state, count in own:
                by_name.setdefault(name, []).append((index, state, count))
        for name, found in by_name.items():
            metric = self._metrics[name]
            first, num_before = before.get(name, (_state(metric), metric._update_count))
            # In the order of the batches, since a reduction may depend on it.
            found.sort(key=lambda item: item[0])
            parts = [first] * bool(num_before) + [state for _, state, _ in found]
            _set(metric, {attribute: _joined(metric, attribute, parts) for attribute in metric._defaults})
            # The cached result is that of one batch, and does not belong to the merged state.
            metric._update_count, metric._computed = num_before + sum(count for *_, count in found), None
            # The states are those of all ranks already.
            metric.sync_on_compute = metric._to_sync = False


@contextmanager
def metrics_kept(module: nn.Module) -> Iterator[None]:
    """Undo in the end what a block changes in the torchmetrics metrics of a module."""
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    states = [(each._copy_state_dict(), each._update_count, each._computed) for each in metrics]
    try:
        yield
    finally:
        for metric, (state, count, computed) in zip(metrics, states, strict=True):
            _set(metric, state)
            metric._update_count, metric._computed = count, computed


def _state(metric: Metric) -> State:
    """Return a metric's state; lists are copied, because metrics append to them."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {name: list(value) if isinstance(value, list) else value for name, value in values.items()}


def _set(metric: Metric, state: State) -> None:
    for name, value in state.items():
        setattr(metric, name, value)


def _joined(metric: Metric, name: str, parts: list[State]) -> Any:
    """Join one value of several states, as torchmetrics joins those of ranks."""
    values = [part[name] for part in parts]
    if any(isinstance(value, list) for value in values):
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    # The function that `add_state` was given.
    reduce = metric._reductions[name]
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    return stacked if reduce is None else reduce(stacked)
