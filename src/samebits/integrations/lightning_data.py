"""The loaders of a Lightning Trainer: its training data in exact order, and each batch of an evaluation on one rank."""

from collections.abc import Callable, Iterator, Mapping
from itertools import tee
from typing import Any

import torch

from samebits.cluster.world import World
from samebits.data.division import Alone, part
from samebits.data.keyed import key
from samebits.data.loader import Loader, requests_of
from samebits.data.order import MicroBatch, Order, Step
from samebits.data.seeding import seed_forward
from samebits.errors import ConfigError
from samebits.own_loop.current import check_equal_state
from samebits.own_loop.loader import check_content, content_of
from samebits.own_loop.samples import LoaderSource
from samebits.own_loop.session import ExactLoop

# The loader that replaces the training DataLoader in a Lightning Trainer.
#
# Lightning's loop counts items of its loaders. Here an item is a step, so what Lightning counts (`global_step`,
# `batch_idx`, limits, intervals) does not depend on the world.


CPU = torch.device("cpu")


class StepLoader:
    """Replaces the training DataLoader. An item is the first micro-batch that this rank has in a step.

    The strategy runs the step's other micro-batches (`begin_next`) before it takes the next item.

    Args:
        source, order, world: Dataset, collation and workers; the order of the samples; the ranks.
        loop: Returns the engine, which is made later than the loader.
        fit_loop: Lightning's loop: it knows the position, also after a resume.
    """

    def __init__(
        self,
        source: LoaderSource,
        order: Order,
        world: World,
        loop: Callable[[], ExactLoop],
        fit_loop: Any,
    ) -> None:
        self._source = source
        self._order = order
        self._world = world
        self._loop = loop
        self._fit_loop = fit_loop
        self._epoch = 0
        self._step: Step | None = None
        self._read: Loader | None = None
        self._num_begun = 0
        self.dataset = source.samples.dataset
        self.batch_size = order.micro_batch
        self.sampler = self  # Lightning calls set_epoch() of a loader's sampler

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self._order.steps_per_epoch

    @property
    def step(self) -> Step:
        """The step of the current item, with this rank's micro-batches, padded."""
        assert self._step is not None
        return self._step

    def begin_next(self) -> Any:
        """Begin the step's next micro-batch, and return its samples as the collate_fn returned them."""
        assert self._read is not None
        micro_batch = self.step.micro_batches[self._num_begun]
        self._num_begun += 1
        samples = self._loop().repeat.read(micro_batch, self._read)
        self._loop().begin(self.step, micro_batch, samples)
        return samples

    def end_step(self) -> None:
        """Note that the step of the current item is done."""
        is_last = (self.step.number + 1) % len(self) == 0
        self._step = None
        if is_last:
            self._loop().leave()  # Lightning does not ask for an item more, and its hooks may take any time

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of an epoch, from 0."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Return what decides the content of steps, for a checkpoint. Lightning saves the position."""
        return content_of(self._order)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a checkpoint belongs to the same data, batch sizes and seed.

        Raises:
            CheckpointError: It does not.
        """
        fix = "Use the dataset, global_batch, micro_batch and seed of the checkpoint."
        check_content(state, self._order, "the checkpoint belongs to another run", fix)

    def __iter__(self) -> Iterator[Any]:
        # Runs with the first item: Lightning makes the iterator before it restores the position.
        self._step = None
        loop = self._loop()
        first = self._epoch * len(self)
        # Lightning does not load them if configure_optimizers has asked for the number of steps.
        for state in self._fit_loop._combined_loader_states_to_load:
            self.load_state_dict(state)
        self._fit_loop._combined_loader_states_to_load = []
        loop.step = first + int(self._fit_loop.epoch_loop.batch_progress.current.ready)
        check_equal_state(loop, self._world)
        every = self._order.steps(self._world, start=loop.step, stop=first + len(self))
        steps, ahead = tee(loop.repeat.repeated(every))
        loader = self._source.open(
            lambda: requests_of(ahead),
            CPU,  # Lightning moves batches, after its own hooks
            num_ranks_here=self._world.num_ranks_here,
        )
        self._read = loader
        try:
            for step in steps:
                self._step = loop.repeat.extended(step)
                self._num_begun = 0
                yield self.begin_next()
        finally:
            loop.leave()
            loader.close()


# Validation and test in a Lightning Trainer: each batch of the dataset on one rank, none twice.
#
# An item of a loader is a batch of the whole dataset, so limits and `batch_idx` do not depend on the world. Lightning's
# loop runs over all items on all ranks, and skips those of other ranks.


EVALUATION = 5  # the part of the key of all random numbers in validation and test
ELSEWHERE = object()  # the item of a batch that another rank evaluates


class EvaluationBatches:
    """Replaces a DataLoader of validation or test. An item is a batch, or `ELSEWHERE` if another rank evaluates it.

    The dataset is cut into batches in its own order. Each rank has a contiguous part of them.

    Args:
        source, world: The DataLoader's dataset, collation and workers; the ranks.
    """

    def __init__(self, source: LoaderSource, world: World, seed: int, steps: "EvalSteps") -> None:
        self._source = source
        self._world = world
        self._steps = steps
        size = source.batch_size
        self._order = Order(
            len(source.samples),
            size,
            size,
            key(seed, EVALUATION),
            is_shuffled=False,
            drop_last=source.drop_last,
        )
        self.dataset = source.samples.dataset
        self.batch_size = size

    def __len__(self) -> int:
        """Return the number of batches of all ranks."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        first, stop = part(0, self._steps.num_used(len(self)), self._world.size, self._world.rank)
        # In a world of one rank, an item of the order is a whole batch.
        steps, ahead = tee(self._order.steps(Alone(), start=first, stop=stop))
        loader = self._source.open(
            lambda: requests_of(ahead),
            CPU,  # Lightning moves batches, after its own hooks
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
        self._trainer = trainer
        self._device = device
        self.current: MicroBatch | None = None  #: The batch of the current item on this rank.

    def num_used(self, num_batches: int) -> int:
        """Return how many of a loader's batches Lightning takes."""
        trainer = self._trainer
        limit = trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
        num_batches = (
            min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
        )
        return (
            min(num_batches, trainer.num_sanity_val_steps)
            if trainer.sanity_checking
            else num_batches
        )

    def install(self, loop: Any) -> None:
        """Let a loop of Lightning skip the batches of other ranks, and merge its `ExactResults` after each loader."""
        for name in ("_evaluation_step", "_store_dataloader_outputs"):
            loop.__dict__.pop(name, None)  # that of an earlier call
        run = loop._evaluation_step
        store = loop._store_dataloader_outputs

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

        loop._evaluation_step = step
        loop._store_dataloader_outputs = merge_and_store

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
