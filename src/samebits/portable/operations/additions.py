"""Additions by index, which a kernel makes in no defined order: sums of integers on a grid.

Signatures are those of torch's operations (ATen).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samebits.portable.operations.pooling import on_grid

aten = torch.ops.aten


def scatter_sum(x: Tensor, terms: int, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Add values by index, exactly: `add` takes them in float64; all share a grid."""
    return on_grid(x, terms, add, whole=True)


def embedding_dense_backward(g: Tensor, indices: Tensor, rows: int, padding: int, scale: bool) -> Tensor:
    """Return the gradient (rows, D) of an embedding's weights."""
    if scale:
        raise NotImplementedError
    flat, places = g.reshape(-1, g.shape[-1]), indices.reshape(-1)
    flat = flat * (places != padding)[:, None]
    return scatter_sum(flat, len(flat), lambda q: q.new_zeros(rows, q.shape[1]).index_add_(0, places, q))


def _length(x: Tensor, dim: int) -> int:
    return x.shape[dim] if x.dim() else 1


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Add rows of `source` at places of a dimension."""
    added = scatter_sum(source, _length(source, dim), lambda q: q.new_zeros(x.shape).index_add_(dim, index, q))
    return x + (added if alpha == 1 else added * alpha)


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Add values at places along a dimension."""
    part = source[tuple(slice(n) for n in index.shape)]
    return x + scatter_sum(part, _length(index, dim), lambda q: q.new_zeros(x.shape).scatter_add_(dim, index, q))


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Write or add values at places."""
    if not accumulate:
        # The method of a tensor takes no None, which stands for a whole dimension.
        written: Tensor = aten.index_put(x, list(indices), values)
        return written
    shape = x[tuple(slice(None) if each is None else each for each in indices)].shape
    values = values.expand(shape).contiguous()
    return x + scatter_sum(
        values, max(values.numel(), 1), lambda q: aten.index_put_(q.new_zeros(x.shape), list(indices), q, True)
    )


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Sum, average, or take the largest or smallest of values at places along a dimension."""
    if reduce in ("amax", "amin"):
        largest: Tensor = aten.scatter_reduce(x, dim, index, source, reduce, include_self=include_self)
        return largest
    if reduce not in ("sum", "mean"):
        raise NotImplementedError
    total = scatter_add(x if include_self else x.scatter(dim, index, 0.0), dim, index, source)
    if reduce == "sum":
        return total
    ones = torch.ones_like(x, dtype=torch.int64)
    count = ones if include_self else ones.scatter(dim, index, 0)
    return total / count.scatter_add(dim, index, torch.ones_like(index)).clamp_(min=1)
