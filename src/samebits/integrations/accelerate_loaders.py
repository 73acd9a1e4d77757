"""The DataLoaders of an `ExactAccelerator`: one to train on, others to evaluate on; and results of all processes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import recursively_apply, send_to_device
from torch import Tensor

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.division import Batches
from samebits.data.order import Order
from samebits.errors import ConfigError
from samebits.own_loop.evaluation import read_batches
from samebits.own_loop.loader import ExactLoader
from samebits.own_loop.samples import LoaderSource


class _PreparedLoader:
    """What Accelerate and scripts read from a prepared DataLoader."""

    def __init__(self, source: LoaderSource, device: torch.device | None) -> None:
        self._device = device
        self.dataset = source.samples.dataset
        self.batch_size = source.batch_size
        self.gradient_state = GradientState()
        self.end_of_dataloader = False  #: Whether the current batch is the last one of this rank.
        #: Accelerate's count of repeated samples; unknown, since `gather_for_metrics` leaves them out itself.
        self.remainder = -1
        self.num_counted: int | None = (
            None  #: Samples of the current batch that metrics count; None if all rows count.
        )

    def _placed(self, batch: Any) -> Any:
        return batch if self._device is None else send_to_device(batch, self._device)

    @property
    def total_dataset_length(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Accept the call that scripts make before each epoch. The order follows from the position itself."""


class TrainingLoader(_PreparedLoader):
    """This rank's micro-batches. Its length is the number of steps of an epoch, at any world size.

    Args:
        make: Returns the loader of the exact loop, once models and optimizers are prepared.
    """

    def __init__(
        self,
        source: LoaderSource,
        order: Order,
        make: Callable[[], ExactLoader],
        device: torch.device | None,
    ) -> None:
        super().__init__(source, device)
        self._order = order
        self._make = make
        self._loader: ExactLoader | None = None
        self.total_batch_size = order.global_batch

    def __len__(self) -> int:
        return self._order.steps_per_epoch

    @property
    def loader(self) -> ExactLoader:
        """The loader of the exact loop. The first use is a collective call."""
        if self._loader is None:
            self._loader = self._make()
        return self._loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, from 0; see `ExactLoader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position."""
        self.loader.load_state_dict(state)

    def check_skip(self, num_steps: int) -> None:
        """Check that a script skips as many steps of the epoch as its checkpoint has done."""
        position = self.loader.step % len(self)
        if position != num_steps:
            raise ConfigError(
                f"skip_first_batches: {num_steps} batches are to be skipped, and the loader is at step {position}",
                cause="load_state() has set the position already. The script counts passes of the loop, or checkpoints "
                "of another world size, where a step has another number of passes.",
                fix="Count steps (if accelerator.sync_gradients: completed += 1), or leave out skip_first_batches().",
            )

    def __iter__(self) -> Iterator[Any]:
        loader = self.loader
        state = self.gradient_state
        # Accelerate asks the active DataLoader whether its end is reached.
        state._add_dataloader(self)
        self.end_of_dataloader = False
        try:
            for batch in loader:
                # Prepared optimizers and schedulers read it: they act in the last micro-batch of a step only.
                state._set_sync_gradients(loader.sync_gradients)
                self.end_of_dataloader = (
                    loader.sync_gradients and (loader.step + 1) % len(self) == 0
                )
                self.num_counted = 0 if loader.is_padding else None
                yield self._placed(batch)
        finally:
            # Outside of a training loop, prepared optimizers act at each call, as Accelerate's do.
            state._set_sync_gradients(True)
            state._remove_dataloader(self)


class EvaluationLoader(_PreparedLoader):
    """This rank's share of a dataset's batches, which are the same at any world size.

    Rank r has batches r, r + W, r + 2W ... Ranks without a batch in the last round repeat the first batch, and its
    results do not count.

    Args:
        source, world, device: What the script's DataLoader reads, the ranks, and the device of the batches.
    """

    def __init__(self, source: LoaderSource, world: World, device: torch.device | None) -> None:
        super().__init__(source, device)
        self._source = source
        self._world = world
        num_samples = len(source.samples)
        if source.drop_last:
            num_samples -= num_samples % source.batch_size
        self._batches = Batches(num_samples, source.batch_size, None)
        self.total_batch_size = source.batch_size * world.size

    def __len__(self) -> int:
        """Return the number of batches of each rank."""
        return -(-len(self._batches) // self._world.size)

    def __iter__(self) -> Iterator[Any]:
        mine = [number * self._world.size + self._world.rank for number in range(len(self))]
        existing = [number if number < len(self._batches) else 0 for number in mine]
        self.gradient_state._add_dataloader(self)
        self.end_of_dataloader = False
        read = read_batches(self._source, self._batches, existing, self._world.device, self._world)
        try:
            for number, (_, indices, batch) in zip(mine, read, strict=True):
                self.end_of_dataloader = number == mine[-1]
                self.num_counted = len(indices) if number < len(self._batches) else 0
                yield self._placed(batch)
        finally:
            self.gradient_state._remove_dataloader(self)


def gather_counted(
    accelerator: Any, data: Any, loader: TrainingLoader | EvaluationLoader, *, as_objects: bool
) -> Any:
    """Gather the current batch's results in the order of the ranks.

    Args:
        data: Tensors of shape (N, ...) with a row for each sample, or (); nested or not. Or a list of plain values.
    """
    is_repeated = loader.num_counted == 0
    has_only_tensors = True
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        has_only_tensors = False
    if as_objects or not has_only_tensors:
        # Not by Accelerate's gather_object, which pickles.
        parts = collectives.all_gather_object(
            accelerator.exact_part.world, [] if is_repeated else list(data)
        )
        return [item for part in parts for item in part]

    def counted(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        if is_repeated:
            rows = rows[:0]
        elif loader.num_counted is not None and len(rows) == loader.batch_size:
            rows = rows[: loader.num_counted]  # the Trainer repeats a mean loss batch_size times
        parts = collectives.all_gather_object(accelerator.exact_part.world, rows.detach().cpu())
        return torch.cat(parts).to(rows.device)

    return recursively_apply(counted, data)
