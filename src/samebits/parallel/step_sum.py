"""One contract for all sums of a step: over whole copies of a model, over shards, with rechecks, and after a loss.

begin          the step's start: buffers are stored, gradients are dropped
  run            for each micro-batch of this rank:
    micro_batch      its random numbers; one forward and backward pass
      backward
reduce         the sums over all ranks: gradients, buffers, extras, the flag
  undo_buffers   where the step is skipped
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Step
from samebits.data.seeding import seed_forward
from samebits.parallel.layer_sums import Suspects
from samebits.parallel.running import RunningBuffers

T = TypeVar("T")


class StepSum(ABC):
    """Sums gradients, buffer changes and a few extra values over a step's micro-batches and all ranks.

    Args:
        num_extras: Number of extra values for each `backward`, weighted and summed like the gradients.

    Attributes:
        extras: The means of the extra values over the step's samples, after `reduce`.
        flag: The number that rank 0 has sent, after `reduce`.
        norm: The 2-norm of the gradient, after `reduce`; not finite where any of its values is not.
    """

    def __init__(self, model: nn.Module, world: World, num_extras: int) -> None:
        self._world, self._num_extras = world, num_extras
        self._device = next((each.device for each in model.parameters() if each.requires_grad), world.device)
        self._buffers = RunningBuffers(model)
        self._step: Step | None = None
        self._now: MicroBatch | None = None
        self._loss_scale = 1.0
        self.extras: list[float] = []
        self.flag = self.norm = 0.0

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """Start a step.

        Args:
            loss_scale: A power of two that multiplies the loss in the backward pass. Gradients are divided by it
                before they are summed. A power of two rounds nothing.
        """
        self._step, self._loss_scale, self._now = step, loss_scale, None
        self._buffers.start_step()

    def run(self, body: Callable[[MicroBatch], T], suspects: Suspects | None = None) -> list[T]:
        """Call `body(micro_batch)` for each of the step's micro-batches of this process.

        Only one runs at a time, the first one first. Synchronized micro-batches switch wherever they wait.

        Args:
            suspects: Receives the micro-batches that contributed a non-finite value to a synchronized batch norm.

        Returns:
            The result of each call.
        """
        return [body(micro_batch) for micro_batch in self._present.micro_batches]

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Context of one forward and backward pass. Seeds torch's generators by the micro-batch's key."""
        self._enter(micro_batch)
        seed_forward(micro_batch.forward_key, self._device)
        try:
            yield
        finally:
            self._now = None

    @property
    def _present(self) -> Step:
        assert self._step is not None, "begin(step) comes first"
        return self._step

    @property
    def _weight(self) -> float:
        assert self._now is not None, "call backward inside `with reducer.micro_batch(...)`"
        return self._now.weight

    def _extras(self, given: Tensor | None) -> Tensor:
        """Return the extra values of a micro-batch, (num_extras,) float32; zeros if there are none."""
        return torch.zeros(self._num_extras, device=self._device) if given is None else given.detach().float()

    def _enter(self, micro_batch: MicroBatch) -> None:
        """Prepare for a micro-batch's gradients."""
        self._now = micro_batch

    @abstractmethod
    def backward(self, loss: Tensor, extras: Tensor | None = None) -> None:
        """Run backward for the micro-batch, and add its weighted gradients to the step's.

        Args:
            loss: (), the mean over the micro-batch's samples.
            extras: (num_extras,) values to average over the step's samples.
        """

    @abstractmethod
    def reduce(self, flag: float = 0.0) -> None:
        """Finish the sums over all ranks.

        Sets the `grad` of every parameter, the model's buffers, and this object's `extras`, `flag` and `norm`. A
        parameter without a gradient in any micro-batch of the step has `grad` None on every rank.

        Args:
            flag: A number that rank 0 sends to all ranks.
        """

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the step's gradient."""

    def undo_buffers(self) -> None:
        """Reset the model's buffers, to drop the step."""
        self._buffers.reset()
