"""The loss of a framework's log: summed over micro-batches in one order, so that logs are equal at any world size."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.data.order import MicroBatch


class StepLosses:
    """The shares of this rank's micro-batches in the losses of some steps."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []  # step, index of the micro-batch; -1 if it does not count
        self._losses: list[Tensor] = []

    def clear(self) -> None:
        """Forget all losses."""
        self._places, self._losses = [], []

    def add(self, step: int, micro_batch: MicroBatch, loss: Tensor) -> None:
        """Add a micro-batch's share in the loss of its step.

        Args:
            step: Number of the step.
            micro_batch: The micro-batch; one with weight 0 does not count.
            loss: The share, ().
        """
        self._places.append((step, micro_batch.index if micro_batch.weight > 0.0 else -1))
        self._losses.append(loss.detach())

    def take(self, device: torch.device) -> Tensor:
        """Return the sum over steps, micro-batches and ranks, and forget it. Called on all ranks.

        Args:
            device: Device of the result.

        Returns:
            A float64 (), rounded to float32: then the mean of equal values over ranks is exact.
        """
        if not self._losses:
            return torch.zeros((), dtype=torch.float64, device=device)
        places = torch.tensor(self._places, dtype=torch.float64, device=device)
        own = torch.cat([places, torch.stack(self._losses).to(places).reshape(-1, 1)], dim=1)
        self.clear()
        parts = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own)
        rows = sorted(tuple(row) for part in parts for row in part.tolist() if row[1] >= 0)
        losses = [loss for *_, loss in rows]
        total = math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
        return torch.tensor(total, dtype=torch.float32, device=device).double()
