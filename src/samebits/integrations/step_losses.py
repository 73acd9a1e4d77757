"""The loss in a framework's log: a sum over micro-batches and ranks that is equal at any world size."""

import math

import torch
from torch import Tensor

from samebits.cluster import collectives
from samebits.cluster.world import World


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
