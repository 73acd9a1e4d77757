"""The loader that replaces the training DataLoader in a Lightning Trainer.

Lightning's loop counts items of its loaders. Here an item is a step, so what Lightning counts (`global_step`,
`batch_idx`, limits, intervals) does not depend on the world.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import tee
from typing import Any

import torch

from samebits.cluster.world import World
from samebits.data.loader import requests_of
from samebits.data.order import MicroBatch, Order, Step
from samebits.own_loop.agreement import check_equal_state
from samebits.own_loop.loader import check_content, content_of
from samebits.own_loop.samples import LoaderSource
from samebits.own_loop.session import ExactLoop

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
        self, source: LoaderSource, order: Order, world: World, loop: Callable[[], ExactLoop], fit_loop: Any
    ) -> None:
        self._source, self._order, self._world, self._loop = source, order, world, loop
        self._fit_loop = fit_loop
        self._epoch = 0
        self._step: Step | None = None
        self._read: Callable[[MicroBatch], Any] | None = None
        self._num_begun = 0
        self.dataset, self.batch_size = source.samples.dataset, order.micro_batch
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
        samples = self._read(micro_batch)
        self._loop().begin(self.step, micro_batch)
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
        loop, first = self._loop(), self._epoch * len(self)
        # Lightning does not load them if configure_optimizers has asked for the number of steps.
        for state in self._fit_loop._combined_loader_states_to_load:
            self.load_state_dict(state)
        self._fit_loop._combined_loader_states_to_load = []
        loop.step = first + int(self._fit_loop.epoch_loop.batch_progress.current.ready)
        check_equal_state(loop, self._world)
        steps, ahead = tee(self._order.steps(self._world, start=loop.step, stop=first + len(self)))
        loader = self._source.open(
            lambda: requests_of(ahead),
            CPU,  # Lightning moves batches, after its own hooks
            num_ranks_here=self._world.num_ranks_here,
        )
        self._read = lambda micro_batch: loader.batch(micro_batch.indices, micro_batch.keys).inputs
        try:
            for step in steps:
                self._step, self._num_begun = step, 0
                yield self.begin_next()
        finally:
            loop.leave()
            loader.close()
