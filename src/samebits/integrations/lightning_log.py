"""What a LightningModule logs, and its torchmetrics, merged over micro-batches and ranks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.errors import ConfigError

# Lightning's package: `lightning.pytorch`, or `pytorch_lightning` in a script that imports only that.
#
# The two have the same content but different classes, and a Trainer accepts only strategies of its own.


PACKAGES = ("lightning.pytorch", "pytorch_lightning")
MISSING = "Run: pip install 'samebits[lightning]'"


def find(module: str, name: str) -> Any:
    """Return a class or function of Lightning by its module, such as "strategies", and name.

    Raises:
        ConfigError: Lightning is not installed, or is a version that lacks it.
    """
    # of a script that imports only the second one, that one
    imported = [each for each in PACKAGES if each in sys.modules]
    package = imported[0] if imported else PACKAGES[find_spec("lightning") is None]
    try:
        return getattr(import_module(f"{package}.{module}"), name)
    except ModuleNotFoundError as error:
        raise ConfigError("Lightning is not installed", cause=error, fix=MISSING) from None
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this version of Lightning has no {module}.{name}",
            given=f"{package} {getattr(sys.modules.get(package), '__version__', '')}",
            cause=error,
            fix="Install a version that docs/lightning.md lists.",
        ) from None


# torchmetrics in a LightningModule: states merged over the batches of an evaluation, in the order of the batches.
#
# torchmetrics keeps one state on each rank, and adds them up over ranks in an order that depends on their number. Here
# every batch is what a rank is there: its state starts empty, and torchmetrics' own reduction joins the states of all
# batches. The metric then has that state on all ranks, and does not sum over ranks any more.


State = dict[str, Any]  # name -> tensor of any shape, or list of tensors


class MetricStates:
    """The states of the metrics that a module has as submodules, by batch."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._world = world
        self._metrics = {
            name: each for name, each in module.named_modules() if isinstance(each, Metric)
        }
        self._before: dict[str, tuple[State, int]] = {}
        self._states: list[tuple[str, int, State, int]] = []

    @contextmanager
    def of_batch(self, index: int) -> Iterator[None]:
        """Take the states of what the block updates as those of a batch; other metrics keep theirs."""
        # torchmetrics has no public names for a metric's states, number of updates and cached result.
        before = {
            name: (_state(metric), metric._update_count, metric._computed)
            for name, metric in self._metrics.items()
        }
        for metric in self._metrics.values():
            metric.reset()  # to new tensors
        try:
            yield
        finally:
            for name, metric in self._metrics.items():
                state, count, computed = before[name]
                if metric._update_count:
                    self._before.setdefault(name, (state, count))
                    self._states.append((name, index, _state(metric), metric._update_count))
                else:
                    _set(metric, state, count, computed)

    def merge(self) -> None:
        """Merge the states of all ranks. Called on all ranks."""
        states = self._states
        before = self._before
        self._states = []
        self._before = {}
        by_name: dict[str, list[tuple[State, int]]] = {}
        every = chain.from_iterable(collectives.all_gather_object(self._world, states))
        # In the order of the batches, since a reduction may depend on it.
        for name, _, state, count in sorted(every, key=lambda item: item[1]):
            by_name.setdefault(name, []).append((state, count))
        for name, found in by_name.items():
            metric = self._metrics[name]
            first, num_before = before.get(name, (_state(metric), metric._update_count))
            parts = [first] * bool(num_before) + [state for state, _ in found]
            merged = {
                attribute: _joined(metric, attribute, parts) for attribute in metric._defaults
            }
            # The cached result is that of one batch, and does not belong to the merged state.
            _set(metric, merged, num_before + sum(count for _, count in found), None)
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
            _set(metric, state, count, computed)


def _state(metric: Metric) -> State:
    """Return a metric's state; lists are copied, because metrics append to them."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {
        name: list(value) if isinstance(value, list) else value for name, value in values.items()
    }


def _set(metric: Metric, state: State, num_updates: int, result: Any) -> None:
    """Set a metric's state, its number of updates and its cached result."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = num_updates
    metric._computed = result


def _joined(metric: Metric, name: str, parts: list[State]) -> Any:
    """Join one value of several states, as torchmetrics joins those of ranks."""
    values = [part[name] for part in parts]
    if any(isinstance(value, list) for value in values):
        return [
            item for value in values for item in (value if isinstance(value, list) else [value])
        ]
    # The function that `add_state` was given.
    reduce = metric._reductions[name]
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    return stacked if reduce is None else reduce(stacked)


# What a LightningModule logs, merged over all micro-batches of a step, or all batches of an evaluation.
#
# Lightning keeps sums on each rank, and adds them up over ranks in an order that depends on their number. Here the
# values of all batches are gathered, merged in the order of the batches, and logged once, with the same result on
# every rank.


# Lightning has no public way to replace how values are averaged over batches and ranks.
_ResultCollection: Any = find("trainer.connectors.logger_connector.result", "_ResultCollection")
_Sync = find("trainer.connectors.logger_connector.result", "_Sync")

Logged = tuple[int, float, int]  # batch, value and number of samples
# Arguments of `self.log` that all ranks need to know; the others are about sums over ranks.
OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "metric_attribute")


@dataclass
class _Entry:
    """What was logged under one name."""

    options: dict[str, Any]  #: Arguments of `self.log`: plain values.
    #: Batch, value () and number of samples of each call on this rank. Empty for a torchmetrics metric.
    items: list[tuple[int, Tensor, int]] = field(default_factory=list)

    def message(self) -> tuple[dict[str, Any], list[Logged]]:
        """Return the entry as plain values."""
        # One transfer for all values: on a GPU each read waits for the device.
        values = torch.stack([value for _, value, _ in self.items]).tolist() if self.items else []
        return self.options, [
            (batch, value, size) for (batch, _, size), value in zip(self.items, values, strict=True)
        ]


class ExactResults(_ResultCollection):
    """Replaces the collection of logged values of one of Lightning's loops."""

    def __init__(self, training: bool, module: Any, world: World) -> None:
        super().__init__(training)
        self._module = module
        self._world = world
        self._batch: tuple[int, int] | None = None
        self._is_muted = False
        self._states = None if training else MetricStates(module, world)
        self._entries: dict[tuple[str, str], _Entry] = {}
        self.num_samples: int | None = None

    @contextmanager
    def of_batch(self, index: int, size: int, *, is_muted: bool = False) -> Iterator[None]:
        """Collect what is logged in the block as values of one batch.

        Args:
            is_muted: Drop the values, because another rank has the batch too.
        """
        self._batch = (index, size)
        self._is_muted = is_muted
        try:
            with nullcontext() if self._states is None else self._states.of_batch(index):
                yield
        finally:
            self._batch = None
            self._is_muted = False

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Take a value; see `LightningModule.log`.

        Args:
            fx, name, **options: Name of the hook that logs, and the other arguments of `LightningModule.log`.
            value: A tensor, (), or a torchmetrics metric.
        """
        if self._batch is None:
            super().log(fx, name, value, **options)
            return
        index, size = self._batch
        entry = self._entries.get((fx, name))
        if entry is None:
            plain = {key: options[key] for key in OPTIONS if key in options}
            reduce_fx = options.get("reduce_fx", "mean")
            plain["reduce_fx"] = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
            entry = self._entries[fx, name] = _Entry(plain)
        if isinstance(value, Metric):
            self._log_metric(fx, name, value, entry.options)
        elif not self._is_muted:
            entry.options["is_double"] = value.dtype == torch.float64
            # Detached: a logged loss would keep its graph until the end of the step.
            entry.items.append((index, value.detach().double(), options.get("batch_size") or size))

    def merge(self) -> None:
        """Merge the values of all ranks, and log the results. Called on all ranks."""
        if self._states is not None:
            self._states.merge()
        entries = self._entries
        self._entries = {}
        merged: dict[tuple[str, str], tuple[dict[str, Any], list[Logged]]] = {}
        messages = [(fx, name, *entry.message()) for (fx, name), entry in entries.items()]
        for own in collectives.all_gather_object(self._world, messages):
            for fx, name, options, items in own:
                first, values = merged.setdefault((fx, name), (options, []))
                first.update(options)
                values.extend(items)
        for (fx, name), (options, items) in merged.items():
            is_double = options.pop("is_double", False)
            if items:
                value, size = _merged(items, options["reduce_fx"])
                kind = torch.float64 if is_double else torch.float32
                result = torch.tensor(value, dtype=kind, device=self._module.device)
                # `no_op`: the value is equal on all ranks already, and Lightning must not average it again.
                super().log(
                    fx,
                    name,
                    result,
                    batch_size=size,
                    sync_dist=True,
                    sync_dist_fn=_Sync.no_op,
                    **options,
                )
            elif options.get("metric_attribute"):
                # A rank without batches has the metric's merged state too.
                self._log_metric(
                    fx, name, self._module.get_submodule(options["metric_attribute"]), options
                )

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Forget values; see Lightning."""
        if metrics is None:
            self._entries = {}
        super().reset(metrics, fx)

    def _log_metric(self, fx: str, name: str, metric: Metric, options: dict[str, Any]) -> None:
        own = {key: value for key, value in options.items() if key != "is_double"}
        super().log(fx, name, metric, **own)

    def _extract_batch_size(self, value: Any, batch_size: int | None, meta: Any) -> int:
        # Outside of micro-batches, a value belongs to the whole step.
        return int(super()._extract_batch_size(value, batch_size or self.num_samples, meta))


def _merged(items: list[Logged], reduce_fx: str) -> tuple[float, int]:
    """Merge (batch, value, number of samples) in the order of the batches, in float64; return value and total."""
    items = sorted(items, key=lambda item: item[0])  # stable: a batch may log several values
    values = [value for _, value, _ in items]
    sizes = [size for _, _, size in items]
    total = sum(sizes)
    if reduce_fx in ("mean", "avg"):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / total, total
    if reduce_fx == "sum":
        return sum(values), total
    reduce = torch.min if reduce_fx == "min" else torch.max  # of NaN they return NaN
    return float(reduce(torch.tensor(values, dtype=torch.float64))), total
