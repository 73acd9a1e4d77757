"""Gradients made smaller on their way: in 16 bits, or as products of two narrow matrices (PowerSGD).

In 16 bits: a micro-batch's gradient is rounded, and so is every sum of two, inside a process as between them. So what
is sent loses nothing by being sent, and the sum is the same at any world size.

PowerSGD (Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression", 2019), with error feedback
and the last step's factor as the start of the next. All it sends is summed over the ranks before anything that is not
linear is done with it, so the gradient follows, but for rounding, from the sum over the ranks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.cluster.world import World
from lockstep.parallel.bucket import Bucket, Flat, group

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_GAIN = 2  # times shorter than the gradient; below that a matrix goes as it is


@dataclass(frozen=True)
class Compression:
    """How gradients travel.

    Attributes:
        name: "none", "bf16", "fp16" or "powersgd".
        rank: Of PowerSGD's matrices.
    """

    name: str = "none"
    rank: int = 4

    @property
    def in_halves(self) -> bool:
        """Whether every sum is rounded to 16 bits."""
        return self.name in LOW_PRECISION

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether PowerSGD makes this gradient shorter."""
        rows, columns = _shape(parameter)
        return self.name == "powersgd" and LEAST_GAIN * self.rank * (rows + columns) <= rows * columns


def make_buckets(
    parameters: Sequence[nn.Parameter],
    tail_length: int,
    world: World,
    compress: Compression,
    *,
    exact: bool,
    max_bytes: int,
) -> tuple[list[Bucket], PowerSGD | None]:
    """All buckets of a model, in the order in which they are sent; the last one has the tail.

    Args:
        parameters: In the order in which backward reaches them.
        tail_length: Values that are summed beside the gradients, never compressed.
        world: The ranks.
        compress: How gradients travel.
        exact: Sum in tree order.
        max_bytes: Of one bucket.

    Returns:
        The buckets, and what sums that of PowerSGD, if there is one.
    """
    device, size = parameters[0].device, world.size
    taken = [parameter for parameter in parameters if compress.takes(parameter)]
    others = [parameter for parameter in parameters if not compress.takes(parameter)]
    dtype = LOW_PRECISION.get(compress.name, torch.float32)
    groups = group(others, max_bytes)
    if compress.in_halves:
        groups.append([])  # the tail's own bucket is never rounded
    buckets = [Bucket(group, 0, size, exact, device, dtype) for group in groups[:-1]]
    low_rank = None
    if taken:
        low_rank = PowerSGD(Bucket(taken, 0, size, False, device), world, compress.rank)
        buckets.append(low_rank.bucket)
    buckets.append(Bucket(groups[-1], tail_length, size, exact, device))
    return buckets, low_rank


class PowerSGD:
    """Sums one bucket by PowerSGD; goes the way of an `Exchange`.

    Args:
        bucket: Of matrices; whatever has more dimensions is one with a row for each output.
        world: The ranks.
        rank: Columns of the factors that are sent.
    """

    def __init__(self, bucket: Bucket, world: World, rank: int) -> None:
        self.bucket, self._world, self._rank = bucket, world, rank
        self._shapes = [_shape(parameter) for parameter in bucket.parameters]
        self._errors: list[Tensor] = []
        self._factors: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Forget what earlier steps left over. So does a resume: none of it is in a checkpoint."""
        # The same on all ranks.
        generator = torch.Generator().manual_seed(0)
        device = self.bucket.device
        self._factors = [
            torch.randn(columns, self._rank, generator=generator).to(device) for _, columns in self._shapes
        ]
        self._errors = [torch.zeros(shape, device=device) for shape in self._shapes]

    @property
    def share(self) -> float:
        """Values that a rank sends of this bucket, over those that there are."""
        sent = sum(self._rank * (rows + columns) for rows, columns in self._shapes)
        return sent / sum(rows * columns for rows, columns in self._shapes)

    def start(self) -> None:
        """Nothing can be sent before the gradient is whole."""

    def middle(self) -> None:
        """The other buckets' messages go first."""

    def finish(self) -> None:
        """Send the factors, and put their product in the place of the gradient."""
        result: Flat = self.bucket.nodes[0][1] if self.bucket.nodes else self.bucket.flat()
        if not self.bucket.nodes:
            result.values.zero_()
        mine = [
            error.add_(view.reshape(shape))
            for error, view, shape in zip(self._errors, result.views, self._shapes, strict=True)
        ]
        lefts = self._summed([matrix @ factor for matrix, factor in zip(mine, self._factors, strict=True)])
        lefts = [torch.linalg.qr(left).Q if left.isfinite().all() else left for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(mine, lefts, strict=True)]
        for error, left, right in zip(self._errors, lefts, rights, strict=True):
            error.addmm_(left, right.T, alpha=-1)
        self._factors = self._summed(rights)
        for view, left, right in zip(result.views, lefts, self._factors, strict=True):
            view.copy_((left @ right.T).view(view.shape))
        self.bucket.settle(result)

    def _summed(self, tensors: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self._world.size > 1:
            dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _shape(parameter: nn.Parameter) -> tuple[int, int]:
    """As a matrix, with a row for each output; of what has one dimension, one row."""
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    return rows, parameter.numel() // rows
