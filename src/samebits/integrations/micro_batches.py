"""The micro-batches of an exact order as the items of a torch DataLoader, for frameworks that read several ahead."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from samebits.data.keyed import IntArray, KeyArray
from samebits.data.loader import read
from samebits.data.micro_batches import num_micro_batches
from samebits.data.order import MicroBatch, Order, Place, Step
from samebits.own_loop.samples import LoaderSource


@dataclass(frozen=True)
class Position:
    """Which micro-batch a batch is."""

    step: int  #: Number of the step, from 0.
    index: int  #: Index among the micro-batches that this rank runs in the step.


_Request = tuple[Position, IntArray, KeyArray]


class _Batches(Dataset[tuple[Position, Any]]):
    """Batches by request, each with its position. Its length is the number of samples, as frameworks expect."""

    def __init__(self, source: LoaderSource) -> None:
        self._samples = source.samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, request: _Request) -> tuple[Position, Any]:
        position, indices, keys = request
        return position, read(self._samples, indices, keys).inputs


class MicroBatchSampler(Sampler[list[_Request]]):
    """The requests of this rank's micro-batches in an order of the samples, epoch by epoch."""

    def __init__(self, order: Order, place: Place) -> None:
        self.order, self._place = order, place
        self._epoch = 0
        self._steps: dict[int, Step] = {}
        #: Micro-batches that each rank runs in a step, except for a smaller last one of an epoch.
        self.num_rounds = self._count(min(order.global_batch, order.num_samples))

    @property
    def batch_sampler(self) -> "MicroBatchSampler":
        """This object: frameworks look for `set_epoch` on the sampler within a sampler."""
        return self

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, the same for all world sizes."""
        return self.order.steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, from 0, of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of micro-batches that each rank runs in an epoch."""
        start, stop = self.order.positions(self.steps_per_epoch - 1)
        return (self.steps_per_epoch - 1) * self.num_rounds + self._count(stop - start)

    def __iter__(self) -> Iterator[list[_Request]]:
        self._steps.clear()
        start = self._epoch * self.steps_per_epoch
        for step in self.order.steps(self._place, start=start, stop=start + self.steps_per_epoch):
            self._steps[step.number] = step
            for index, micro_batch in enumerate(step.micro_batches):
                yield [(Position(step.number, index), micro_batch.indices, micro_batch.keys)]

    def find(self, position: Position) -> tuple[Step, MicroBatch]:
        """Return the step and micro-batch at a position of the current iteration, and forget earlier steps."""
        for number in [number for number in self._steps if number < position.step]:
            del self._steps[number]
        step = self._steps[position.step]
        return step, step.micro_batches[position.index]

    def _count(self, num_samples: int) -> int:
        return -(-num_micro_batches(num_samples, self.order.micro_batch) // self._place.size)


def read_ahead(data: DataLoader[Any], source: LoaderSource, sampler: MicroBatchSampler) -> DataLoader[Any]:
    """Return a DataLoader of (position, batch), with the workers and memory settings of another one.

    Args:
        data, source, sampler: The DataLoader to replace, what it reads, and the order of the micro-batches.
    """
    has_workers = data.num_workers > 0
    return DataLoader(
        _Batches(source),
        batch_sampler=sampler,
        collate_fn=operator.itemgetter(0),  # a list of one batch, and picklable
        num_workers=data.num_workers,
        pin_memory=data.pin_memory,
        persistent_workers=data.persistent_workers,
        # torch refuses both settings without workers.
        prefetch_factor=data.prefetch_factor if has_workers else None,
        multiprocessing_context=data.multiprocessing_context if has_workers else None,
        timeout=data.timeout,
        worker_init_fn=source.init_worker,
    )
