"""What an exact loop takes over from a torch DataLoader: its dataset, order, collation and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from samebits.data.keyed import IntArray, KeyArray
from samebits.data.order import Order, Place, Step
from samebits.data.padded_order import PaddedOrder
from samebits.data.samples import Batch, Samples
from samebits.data.sources.map_style import check_map_style, files_of
from samebits.errors import ConfigError


@dataclass(frozen=True)
class LoopOrder(PaddedOrder):
    """An order with the choices of a DataLoader.

    Attributes:
        is_shuffled: Permute the samples of each epoch; otherwise their order is that of the dataset.
        drop_last: Leave out a last step with fewer samples.
    """

    is_shuffled: bool = True
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        if self.drop_last:
            return self.num_samples // self.global_batch
        return -(-self.num_samples // self.global_batch)

    def indices(self, epoch: int, positions: IntArray) -> IntArray:
        """Return the samples, (N,), at some positions, (N,), of an epoch's order."""
        return super().indices(epoch, positions) if self.is_shuffled else positions

    def steps(self, place: Place, *, start: int = 0, stop: int) -> Iterator[Step]:
        """Iterate over steps; see `Order.steps`. All ranks have equally many micro-batches."""
        if place.size == 1:  # nothing to pad
            yield from Order.steps(self, place, start=start, stop=stop)
        else:
            yield from super().steps(place, start=start, stop=stop)


class CollatedSamples(Samples):
    """A map-style dataset whose batches are what a DataLoader's `collate_fn` returns.

    Args:
        dataset: Has `__len__` and `__getitem__`, or `__getitems__` for a list of indices.
        collate: List of samples -> batch.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def files(self) -> list[str | PathLike[str]] | None:  # type: ignore[override]  # a property, since the list may be long
        """Paths of the dataset's files, if it lists them."""
        return files_of(self.dataset)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read samples; see `Samples.batch`. Random numbers follow from the first sample's key (`data/loader.py`)."""
        numbers = indices.tolist()
        if callable(getattr(self.dataset, "__getitems__", None)):
            items = self.dataset.__getitems__(numbers)
        else:
            items = [self.dataset[number] for number in numbers]
        return Batch(self._collate(items), None, torch.from_numpy(indices))


@dataclass(frozen=True)
class LoaderSource:
    """What is taken over from a DataLoader.

    Attributes:
        samples: The dataset with its collation.
        is_shuffled: Whether its sampler shuffles.
        drop_last: Whether a last incomplete batch is left out.
        batch_size: Its batch size; None if it has none.
        num_workers: Its number of workers.
        prefetch: Batches that each worker reads ahead.
        sampler: Its DistributedSampler, whose `set_epoch` the loop may call.
    """

    samples: CollatedSamples
    is_shuffled: bool
    drop_last: bool
    batch_size: int | None
    num_workers: int
    prefetch: int
    sampler: DistributedSampler[Any] | None


def source_of(data: Any) -> LoaderSource:
    """Take over a DataLoader.

    Args:
        data: A DataLoader over a map-style dataset, in order or shuffled.

    Raises:
        ConfigError: It is no DataLoader, its dataset is a stream, or its order can't be repeated at another world size.
    """
    if not isinstance(data, DataLoader):
        raise ConfigError(
            f"data is a {type(data).__name__}",
            allowed="a torch.utils.data.DataLoader",
            fix="Give DataLoader(dataset, batch_size=..., shuffle=True).",
        )
    check_map_style(data.dataset)
    if len(data.dataset) == 0:  # type: ignore[arg-type]  # map-style
        raise ConfigError("the dataset is empty", fix="Give it at least one sample.")
    is_shuffled, sampler = _order_of(data)
    batches = data.batch_sampler if isinstance(data.batch_sampler, BatchSampler) else data
    return LoaderSource(
        CollatedSamples(data.dataset, data.collate_fn),
        is_shuffled,
        batches.drop_last,
        batches.batch_size,
        data.num_workers,
        data.prefetch_factor or 2,
        sampler,
    )


def _order_of(data: DataLoader[Any]) -> tuple[bool, DistributedSampler[Any] | None]:
    """Return whether a DataLoader shuffles, and its DistributedSampler."""
    if data.batch_sampler is not None and type(data.batch_sampler) is not BatchSampler:
        raise _unknown(data.batch_sampler)
    # With a batch sampler of its own, a DataLoader's `sampler` is a default that it does not use.
    sampler = data.sampler if data.batch_sampler is None else data.batch_sampler.sampler
    if type(sampler) is DistributedSampler:
        return sampler.shuffle, sampler
    if type(sampler) is SequentialSampler:
        return False, None
    # The public `num_samples` is never None: it does not show whether the script has set it.
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True, None
    raise _unknown(sampler)


def _unknown(sampler: object) -> ConfigError:
    return ConfigError(
        f"the sampler {type(sampler).__name__} decides the order itself",
        allowed="shuffle=True, shuffle=False, or a DistributedSampler, which the exact order replaces",
        cause="Its order, or how it splits samples over ranks, can depend on the number of processes.",
        fix="Leave it out, or write its choice into the dataset, such as an oversampled list of indices.",
    )
