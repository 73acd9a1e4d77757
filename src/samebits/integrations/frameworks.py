"""What the integrations share: micro-batches as items of a torch DataLoader, losses for a log, and tables of
refusals.
"""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.division import num_micro_batches
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.loader import read
from samebits.data.order import MicroBatch, Order, Place, Step
from samebits.errors import ConfigError
from samebits.own_loop.samples import LoaderSource

# What a framework can be configured with that cannot be exact: tables of (whether it is given, what, why, fix).


class Refusal(NamedTuple):
    """A configuration that is refused."""

    is_given: object  #: Whether it is given.
    what: str  #: The configuration with its value.
    why: str  #: Why training with it cannot be exact.
    fix: str  #: What to do.
    allowed: str = ""  #: What can be given.


def accumulation(num_steps: int) -> Refusal:
    """Return the refusal of `gradient_accumulation_steps`."""
    why = "global_batch counts all samples of a step, so accumulation follows from it."
    what = f"gradient_accumulation_steps is {num_steps}"
    fix = "Leave out gradient_accumulation_steps."
    return Refusal(num_steps != 1, what, why, fix)


def refuse(*rows: Refusal) -> None:
    """Refuse the first configuration that is given."""
    for row in rows:
        if row.is_given:
            raise ConfigError(row.what, allowed=row.allowed, cause=row.why, fix=row.fix)


# The micro-batches of an exact order as the items of a torch DataLoader, for frameworks that read several ahead.


@dataclass(frozen=True)
class LoaderPosition:
    """Which micro-batch a batch is."""

    step: int  #: Number of the step, from 0.
    index: int  #: Index among the micro-batches that this rank runs in the step.


_Request = tuple[LoaderPosition, IntArray, KeyArray]


class _Batches(Dataset[tuple[LoaderPosition, Any]]):
    """Batches by request, each with its position. Its length is the number of samples, as frameworks expect."""

    def __init__(self, source: LoaderSource) -> None:
        self._samples = source.samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, request: _Request) -> tuple[LoaderPosition, Any]:
        position, indices, keys = request
        return position, read(self._samples, indices, keys).inputs


class MicroBatchSampler(Sampler[list[_Request]]):
    """The requests of this rank's micro-batches in an order of the samples, epoch by epoch."""

    def __init__(self, order: Order, place: Place) -> None:
        self.order = order
        self._place = place
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
                yield [(LoaderPosition(step.number, index), micro_batch.indices, micro_batch.keys)]

    def find(self, position: LoaderPosition) -> tuple[Step, MicroBatch]:
        """Return the step and micro-batch at a position of the current iteration, and forget earlier steps."""
        for number in [number for number in self._steps if number < position.step]:
            del self._steps[number]
        step = self._steps[position.step]
        return step, step.micro_batches[position.index]

    def _count(self, num_samples: int) -> int:
        return -(-num_micro_batches(num_samples, self.order.micro_batch) // self._place.size)


def read_ahead(
    data: DataLoader[Any], source: LoaderSource, sampler: MicroBatchSampler
) -> DataLoader[Any]:
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


# The loss in a framework's log: a sum over micro-batches and ranks that is equal at any world size.


class StepLosses:
    """The shares of this rank's micro-batches in the losses of some steps."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def clear(self) -> None:
        """Forget all losses."""
        self._losses = []

    def add(self, loss: Tensor) -> None:
        """Add a micro-batch's share, of shape (), in the loss of its step."""
        # Detached: the loss would keep its graph until the next log.
        self._losses.append(loss.detach().double())

    def take(self, world: World) -> Tensor:
        """Return the sum over micro-batches, steps and ranks, of shape (), and forget it. Called on all ranks.

        It is rounded to float32: then the mean of equal values over ranks is exact.
        """
        own = torch.stack(self._losses).tolist() if self._losses else []
        self.clear()
        # fsum rounds once, at the end, so the order does not matter.
        losses = [loss for part in collectives.all_gather_object(world, own) for loss in part]
        total = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
        return torch.tensor(total, dtype=torch.float32, device=world.device).double()
