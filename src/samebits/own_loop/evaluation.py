"""Evaluation in a loop of the user: each sample once, and results that are equal in every digit at any world size."""

import math
import warnings
from collections import ChainMap
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.division import Batches
from samebits.data.keyed import IntArray, keys
from samebits.data.loader import Request
from samebits.data.seeding import seed_between
from samebits.errors import ConfigError
from samebits.own_loop.current import current_world
from samebits.own_loop.samples import LoaderSource, source_of


def read_batches(
    source: LoaderSource,
    batches: Batches,
    numbers: Iterable[int],
    device: torch.device,
    world: World,
) -> Iterator[tuple[int, IntArray, Any]]:
    """Read batches of a dataset by their numbers; yield number, indices of the samples (N,), and the batch.

    Samples may draw random numbers here. How many a rank draws depends on its share of the batches, so the state of
    torch's generator is restored in the end.
    """

    def requests() -> Iterator[Request]:
        for number in numbers:
            yield batches[number], keys(0, 0, batches[number])

    loader = source.open(requests, device, num_ranks_here=world.num_ranks_here)
    generator = torch.get_rng_state()
    try:
        for number, request in zip(numbers, requests(), strict=True):
            yield number, request[0], loader.batch(*request).inputs
    finally:
        loader.close()
        torch.set_rng_state(generator)


def _warn_of_training(module: nn.Module, _: Any) -> None:
    """Warn of a batch normalization in training mode: its running mean counts samples of the evaluation."""
    if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
        warnings.warn(
            "the model is in training mode while an EvalLoader is read, so its batch normalizations count samples of "
            "the evaluation, each rank its own ones. Call model.eval() before the pass, and model.train() after it.",
            stacklevel=2,
        )


class EvalLoader:
    """Iterates over this rank's share of a dataset, and merges what the loop counts.

    The dataset is cut into batches in its own order, regardless of the world; rank r has every W-th batch. Sums are
    formed from each batch's numbers, in the order of the batches::

        for x, y in loader:
            loader.add(loss=F.cross_entropy(model(x), y, reduction="sum"), correct=(model(x).argmax(1) == y).sum())
        print(loader.sums()["correct"] / len(dataset))

    Args:
        data: A DataLoader. Its order is ignored.
        device: Device of the batches; None: the CPU.
    """

    def __init__(self, data: Any, device: torch.device | str | None = None) -> None:
        source = source_of(data)
        self._device = torch.device("cpu" if device is None else device)
        self._source = source
        self.world: World = current_world(self._device)
        self._batches = Batches(len(source.samples), source.batch_size, None)
        self._current = -1
        self._numbers: dict[int, dict[str, list[float]]] = {}
        self._results: dict[int, list[Any]] = {}
        # metrics with their states by batch, by identity
        self._metrics: dict[int, tuple[Any, dict[int, dict[str, Any]]]] = {}
        self.dataset = source.samples.dataset
        self.batch_size = source.batch_size

    def __len__(self) -> int:
        """Return the number of batches of all ranks."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._numbers = {}
        self._results = {}
        self._metrics = {}
        mine = range(self.world.rank, len(self._batches), self.world.size)
        read = read_batches(self._source, self._batches, mine, self._device, self.world)
        watching = register_module_forward_pre_hook(_warn_of_training)
        try:
            for self._current, indices, inputs in read:
                self.world.activity.enter("evaluating")
                seed_between(self._device, 0, int(indices[0]))
                yield inputs
                watching.remove()  # the first batch shows it
            if mine and not (self._numbers or self._results or self._metrics):
                warnings.warn(
                    f"a pass over an EvalLoader has counted nothing: this process has read {len(mine)} of {len(self)} "
                    "batches, so what the script counts itself is that of a share. Count by loader.add(), "
                    "loader.update(metric, ...) or loader.collect().",
                    stacklevel=2,
                )
        finally:
            self._current = -1
            watching.remove()

    def add(self, **numbers: Tensor | float) -> None:
        """Add numbers of the current batch, floats or 0-d tensors: sums over its samples, such as correct ones."""
        own = self._numbers.setdefault(self._batch(), {})
        for name, number in numbers.items():
            own.setdefault(name, []).append(float(number))

    def sums(self) -> dict[str, float]:
        """Return the sums over all batches, equal on all ranks. Called on all of them after the loop."""
        merged: dict[str, list[float]] = {}
        for own in collectives.all_gather_object(self.world, self._numbers):
            for numbers in own.values():
                # `extend`: fsum needs the single numbers, as a sum of each rank would be rounded already.
                for name, values in numbers.items():
                    merged.setdefault(name, []).extend(values)
        # fsum rounds once, at the end, so the order does not matter. It raises an error for infinities.
        return {
            name: math.fsum(values) if all(map(math.isfinite, values)) else math.nan
            for name, values in sorted(merged.items())
        }

    def collect(self, results: Iterable[Any]) -> None:
        """Keep results of the current batch, such as detections: numbers, text, lists, mappings, tensors on the CPU."""
        self._results.setdefault(self._batch(), []).extend(results)

    def collected(self) -> list[Any]:
        """Return the results of all batches in the order of the dataset, equal on all ranks.

        Called on all of them after the loop.
        """
        by_batch = ChainMap(*collectives.all_gather_object(self.world, self._results))
        return [result for index in sorted(by_batch) for result in by_batch[index]]

    def update(self, metric: Any, *args: Any, **kwargs: Any) -> None:
        """Update a torchmetrics metric with the current batch. Its other contents are dropped.

        Args:
            metric: A `torchmetrics.Metric` with `merge_state` (1.5 or later).
            *args: Arguments of its `update`.
            **kwargs: Arguments of its `update`.
        """
        if not callable(getattr(metric, "merge_state", None)):
            raise ConfigError(
                f"the metric {type(metric).__name__} has no merge_state",
                allowed="a torchmetrics.Metric, 1.5 or later",
                fix="Count with loader.add(...), or update torchmetrics.",
            )
        if getattr(metric, "full_state_update", False) is not False or getattr(
            metric, "dist_sync_on_step", False
        ):
            raise ConfigError(
                f"the states of the metric {type(metric).__name__} do not merge: it has full_state_update",
                fix="Count with loader.add(...), or choose another metric.",
            )
        metric.reset()
        metric.update(*args, **kwargs)
        _, states = self._metrics.setdefault(id(metric), (metric, {}))
        # A copy, since the next `reset` and `update` change the metric's own tensors.
        states[self._batch()] = _copied(metric.metric_state)

    def compute(self, metric: Any) -> Any:
        """Return a metric's value over all batches, equal on all ranks. Called on all of them after the loop.

        Args:
            metric: The metric that `update` was called with; it then has the state of all batches.
        """
        # A rank without batches has not met the metric.
        _, mine = self._metrics.get(id(metric), (metric, {}))
        by_batch = ChainMap(*collectives.all_gather_object(self.world, mine))
        metric.reset()
        merged: dict[str, Any] | None = None
        # In the order of the batches, since merging floats depends on it.
        for count, index in enumerate(sorted(by_batch), start=1):
            # As in torchmetrics' own forward: the metric has the batch's state, and merges what is there so far.
            for name, value in by_batch[index].items():
                setattr(metric, name, value)
            # torchmetrics weights a mean over updates by this count.
            metric._update_count = count
            if merged is not None:
                metric.merge_state(merged)
            merged = _copied(metric.metric_state)
        return metric.compute()

    def _batch(self) -> int:
        if self._current < 0:
            raise ConfigError(
                "add(), collect() and update() belong to the current batch, and there is none",
                fix="Call them in the body of `for ... in loader`.",
            )
        return self._current


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [item.clone() for item in value] if isinstance(value, list) else value.clone()
        for name, value in state.items()
    }
