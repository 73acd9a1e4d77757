"""Compressed gradients: in 16 bits, or as products of two narrow matrices (PowerSGD).

16 bits: the gradient of each micro-batch is rounded, and so is every sum of two, within a process and between
processes. So sending rounds nothing further, and the sum is the same at any world size.

PowerSGD (Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019), with error feedback and a warm start from the last step's factor. Factors are summed over
the ranks before any non-linear operation, so the result depends, up to rounding, only on the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.parallel.bucket import Bucket, Flat, group

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIN_RATIO = 2  # a matrix is compressed only if it becomes at least this many times smaller


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed.

    Attributes:
        name: "none", "bf16", "fp16" or "powersgd".
        rank: Rank of the PowerSGD approximation.
    """

    name: str = "none"
    rank: int = 4

    @property
    def is_16bit(self) -> bool:
        """Whether gradients and their sums are rounded to 16 bits."""
        return self.name in LOW_PRECISION

    def applies_to(self, parameter: nn.Parameter) -> bool:
        """Return whether PowerSGD compresses the gradient of a parameter."""
        rows, columns = _shape(parameter)
        return self.name == "powersgd" and MIN_RATIO * self.rank * (rows + columns) <= rows * columns


def make_buckets(
    parameters: Sequence[nn.Parameter],
    tail_length: int,
    world: World,
    compress: Compression,
    *,
    exact: bool,
    max_bytes: int,
) -> tuple[list[Bucket], PowerSGD | None]:
    """Make all buckets of a model, in the order in which they are sent. The last one has the tail.

    Args:
        parameters: In the order in which backward reaches them.
        tail_length: Number of values summed beside the gradients, never compressed.
        world: The ranks.
        compress: How gradients are compressed.
        exact: Sum in tree order.
        max_bytes: Largest size of a bucket of several parameters.

    Returns:
        The buckets, and the PowerSGD reduction of one of them, or None.
    """
    # The length of a bucket must not depend on a world whose size may change.
    device, size = parameters[0].device, world.size if world.membership is None else 1
    taken = [parameter for parameter in parameters if compress.applies_to(parameter)]
    others = [parameter for parameter in parameters if not compress.applies_to(parameter)]
    dtype = LOW_PRECISION.get(compress.name, torch.float32)
    groups = group(others, max_bytes)
    if compress.is_16bit:
        groups.append([])  # the tail's own bucket is never rounded
    buckets = [Bucket(group, 0, size, exact, device, dtype) for group in groups[:-1]]
    low_rank = None
    if taken:
        low_rank = PowerSGD(Bucket(taken, 0, size, False, device), world, compress.rank)
        buckets.append(low_rank.bucket)
    buckets.append(Bucket(groups[-1], tail_length, size, exact, device))
    return buckets, low_rank


class PowerSGD:
    """Sums one bucket by PowerSGD, with the methods of a `TreeAllReduce`.

    Args:
        bucket: Parameters of two or more dimensions, each taken as a matrix with one row for each output.
        world: The ranks.
        rank: Number of columns of the factors that are sent.
    """

    def __init__(self, bucket: Bucket, world: World, rank: int) -> None:
        self.bucket, self._world, self._rank = bucket, world, rank
        self._shapes = [_shape(parameter) for parameter in bucket.parameters]
        self._errors: list[Tensor] = []
        self._factors: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Drop the errors and factors of earlier steps. A resume does the same: checkpoints do not contain them."""
        # The same factors on all ranks, without touching torch's default generator.
        generator = torch.Generator().manual_seed(0)
        device = self.bucket.device
        self._factors = [
            torch.randn(columns, self._rank, generator=generator).to(device) for _, columns in self._shapes
        ]
        self._errors = [torch.zeros(shape, device=device) for shape in self._shapes]

    @property
    def share(self) -> float:
        """Number of values that a rank sends, divided by the number of gradient values."""
        sent = sum(self._rank * (rows + columns) for rows, columns in self._shapes)
        return sent / sum(rows * columns for rows, columns in self._shapes)

    def start(self) -> None:
        """Do nothing: the factors need the complete gradient."""

    def middle(self) -> None:
        """Do nothing: the other buckets' messages go first."""

    def finish(self) -> None:
        """All-reduce the two factors, and replace the gradient by their product."""
        result: Flat = self.bucket.nodes[0][1] if self.bucket.nodes else self.bucket.flat()
        if not self.bucket.nodes:
            result.values.zero_()
        mine = [
            error.add_(view.reshape(shape))
            for error, view, shape in zip(self._errors, result.views, self._shapes, strict=True)
        ]
        # P = M Q, summed; then orthonormalized; then Q = M^T P, summed: algorithm 1 of the paper.
        lefts = self._summed([matrix @ factor for matrix, factor in zip(mine, self._factors, strict=True)])
        # LAPACK raises on values that are not finite; the engine reports such a gradient itself.
        lefts = [torch.linalg.qr(left).Q if left.isfinite().all() else left for left in lefts]
        rights = [matrix.T @ left for matrix, left in zip(mine, lefts, strict=True)]
        # Error feedback is local: each rank keeps what its own gradient lost.
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
    """Return (rows, columns): one row for each output, or a single row for one dimension."""
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    return rows, parameter.numel() // rows
