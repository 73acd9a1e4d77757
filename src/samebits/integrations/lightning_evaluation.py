"""Validation and test in a Lightning Trainer: each batch of the dataset on one rank, none twice.

An item of a loader is a batch of the whole dataset, so limits and `batch_idx` do not depend on the world. Lightning's
loop runs over all items on all ranks, and skips those of other ranks.
"""

from collections.abc import Iterator
from itertools import tee
from typing import Any

import torch

from samebits.cluster.world import World
from samebits.data.keyed import key
from samebits.data.loader import requests_of
from samebits.data.micro_batches import Alone, part
from samebits.data.order import MicroBatch, Order
from samebits.data.seeding import seed_forward
from samebits.errors import ConfigError
from samebits.own_loop.samples import LoaderSource

EVALUATION = 5  # the part of the key of all random numbers in validation and test
ELSEWHERE = object()  # the item of a batch that another rank evaluates


class EvaluationBatches:
    """Replaces a DataLoader of validation or test. An item is a batch, or `ELSEWHERE` if another rank evaluates it.

    The dataset is cut into batches in its own order. Each rank has a contiguous part of them.

    Args:
        source, world: The DataLoader's dataset, collation and workers; the ranks.
    """

    def __init__(self, source: LoaderSource, world: World, seed: int, steps: "EvalSteps") -> None:
        if source.batch_size is None:
            raise ConfigError("the DataLoader has no batch_size", fix="Set batch_size.")
        self._source, self._world, self._steps = source, world, steps
        size = source.batch_size
        self._order = Order(
            len(source.samples), size, size, key(seed, EVALUATION), is_shuffled=False, drop_last=source.drop_last
        )
        self.dataset, self.batch_size = source.samples.dataset, size

    def __len__(self) -> int:
        """Return the number of batches of all ranks."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        first, stop = part(0, self._steps.num_used(len(self)), self._world.size, self._world.rank)
        # In a world of one rank, an item of the order is a whole batch.
        steps, ahead = tee(self._order.steps(Alone(), start=first, stop=stop))
        loader = self._source.open(
            lambda: requests_of(ahead),
            torch.device("cpu"),  # Lightning moves batches, after its own hooks
            num_ranks_here=self._world.num_ranks_here,
        )
        try:
            for index in range(len(self)):
                self._world.activity.num_beats += 1  # a long validation within an epoch is no hang
                if not first <= index < stop:
                    yield ELSEWHERE
                    continue
                (batch,) = next(steps).micro_batches
                self._steps.current = batch
                yield loader.batch(batch.indices, batch.keys).inputs
        finally:
            loader.close()


class EvalSteps:
    """What the loops of validation and test do for an item."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self.current: MicroBatch | None = None  #: The batch of the current item on this rank.

    def num_used(self, num_batches: int) -> int:
        """Return how many of a loader's batches Lightning takes."""
        trainer = self._trainer
        limit = trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
        num_batches = min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
        return min(num_batches, trainer.num_sanity_val_steps) if trainer.sanity_checking else num_batches

    def install(self, loop: Any) -> None:
        """Let a loop of Lightning skip the batches of other ranks, and merge its `ExactResults` after each loader."""
        for name in ("_evaluation_step", "_store_dataloader_outputs"):
            loop.__dict__.pop(name, None)  # that of an earlier call
        run, store = loop._evaluation_step, loop._store_dataloader_outputs

        def step(batch: Any, batch_idx: int, dataloader_idx: int, *rest: Any) -> None:
            if batch is ELSEWHERE:
                self._skip(loop, dataloader_idx)
                return
            # Loaders that are combined in another way give several batches at once.
            if self.current is None or not loop._is_sequential:
                raise ConfigError(
                    "the dataloaders of validation or test are combined",
                    allowed="one, or a list of them",
                    fix="Return a list of DataLoaders.",
                )
            seed_forward(self.current.forward_key, self._device)
            with loop._results.of_batch(self.current.step, len(self.current)):
                run(batch, batch_idx, dataloader_idx, *rest)

        def merge_and_store() -> None:
            loop._results.merge()
            store()

        loop._evaluation_step, loop._store_dataloader_outputs = step, merge_and_store

    def _skip(self, loop: Any, dataloader_idx: int) -> None:
        """Count an item as Lightning does, without its batch."""
        index = dataloader_idx if loop._is_sequential and loop.num_dataloaders > 1 else None
        # Lightning numbers batches in logs and progress bars by these counts.
        self._trainer._logger_connector.on_batch_start(None, index)
        for count in ("ready", "started", "processed", "completed"):
            getattr(loop.batch_progress, f"increment_{count}")()
        if not self._trainer.sanity_checking:
            loop._has_run = True
            loop._seen_batches_per_dataloader[dataloader_idx] += 1
