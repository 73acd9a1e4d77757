"""Pooling and additions by index: sums of integers on a grid by torch's own kernels in float64.

A sum of integers below 2**53 is exact in any order, so it does not matter in which order a kernel adds, or whether it
adds atomically on a GPU. Signatures are those of torch's operations (ATen).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samebits.portable.grid import grid, num_bits

aten = torch.ops.aten


def on_grid(x: Tensor, terms: int, add: Callable[[Tensor], Tensor], *, whole: bool = False) -> Tensor:
    """Apply a linear function that adds values, each at most `terms` of them, to integers in float64.

    Args:
        x: (N, ...), float32.
        terms: Number of values of a sum, at most.
        add: Takes float64 and returns float64, of (N, ...) unless `whole`.
        whole: Whether all samples share a grid; otherwise each has its own.
    """
    if not x.numel():
        return add(x.double()).to(x.dtype)
    up, down = grid(x, num_bits(terms), range(x.dim()) if whole else range(1, x.dim()))
    sums = add((x * up).round_().double()).add_(0.0)
    down = down.double()
    return sums.mul_(down.view(()) if whole else down.view(-1, *[1] * (sums.dim() - 1))).to(x.dtype)


def _pair(values: Sequence[int]) -> tuple[int, int]:
    return (values[0], values[-1])


def max_pool2d_backward(
    g: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool, indices: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient of max pooling's input."""
    shape = x.shape if x.dim() == 4 else (1, *x.shape)
    flat = (*shape[:2], -1)
    g, indices = g.reshape(flat), indices.reshape(flat)

    def scatter(values: Tensor) -> Tensor:
        return values.new_zeros(*shape[:2], shape[2] * shape[3]).scatter_add_(2, indices, values)

    return on_grid(g, math.prod(_pair(kernel)), scatter).view(x.shape)


def _divisor(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> Tensor | float:  # fmt: skip
    if divisor is not None:
        return float(divisor)
    if count_include_pad and any(padding) and ceil_mode:
        raise NotImplementedError
    if (count_include_pad and any(padding)) or not (ceil_mode or any(padding)):
        return float(math.prod(_pair(kernel)))
    ones = x.new_ones(1, 1, *x.shape[-2:])
    counts: Tensor = aten.avg_pool2d(ones, kernel, stride, padding, ceil_mode, True, 1)
    return counts


def avg_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Average pooling of (N, C, H, W)."""
    sums = on_grid(
        x, math.prod(_pair(kernel)), lambda q: aten.avg_pool2d(q, kernel, stride, padding, ceil_mode, True, 1)
    )
    return sums / _divisor(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool2d_backward(
    g: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Tensor:  # fmt: skip
    """Return the gradient of average pooling's input."""
    g = g / _divisor(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    wide = x.double()
    return on_grid(
        g, math.prod(_pair(kernel)),
        lambda q: aten.avg_pool2d_backward(q, wide, kernel, stride, padding, ceil_mode, True, 1),
    )  # fmt: skip


def _windows(size: int, out: int, device: torch.device) -> Tensor:
    """Which pixels each pixel of an adaptive pooling averages, (out, size) float32 of 0 and 1."""
    i = torch.arange(out, device=device)
    start, stop = i * size // out, ((i + 1) * size + out - 1) // out
    pixel = torch.arange(size, device=device)
    return ((pixel >= start[:, None]) & (pixel < stop[:, None])).float()


def adaptive_avg_pool2d(x: Tensor, size: Sequence[int]) -> Tensor:
    """Adaptive average pooling of (N, C, H, W)."""
    rows, columns = (_windows(x.shape[-2 + d], size[d], x.device) for d in (0, 1))
    count = rows.sum(1)[:, None] * columns.sum(1)
    terms = math.prod(x.shape[-2:])
    sums = on_grid(x, terms, lambda q: rows.double() @ q @ columns.double().T)
    return sums / count


def adaptive_avg_pool2d_backward(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of adaptive average pooling's input."""
    rows, columns = (_windows(x.shape[-2 + d], g.shape[-2 + d], x.device) for d in (0, 1))
    g = g / (rows.sum(1)[:, None] * columns.sum(1))
    return on_grid(g, math.prod(g.shape[-2:]), lambda q: rows.double().T @ q @ columns.double())


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


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Add rows of `source` at places of a dimension."""
    added = scatter_sum(source, source.shape[dim], lambda q: q.new_zeros(x.shape).index_add_(dim, index, q))
    return x + (added if alpha == 1 else added * alpha)


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Add values at places along a dimension."""
    part = source[tuple(slice(n) for n in index.shape)]
    return x + scatter_sum(part, index.shape[dim], lambda q: q.new_zeros(x.shape).scatter_add_(dim, index, q))


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Write or add values at places."""
    if not accumulate:
        return x.clone().index_put_(tuple(indices), values)
    shape = x[tuple(slice(None) if each is None else each for each in indices)].shape
    values = values.expand(shape).contiguous()
    return x + scatter_sum(
        values, max(values.numel(), 1), lambda q: q.new_zeros(x.shape).index_put_(tuple(indices), q, accumulate=True)
    )


def upsample_nearest2d_backward(
    g: Tensor, size: Sequence[int], shape: Sequence[int], scale_h: float | None = None, scale_w: float | None = None
) -> Tensor:
    """Return the gradient of nearest resizing's input."""
    terms = math.prod(-(-size[d] // shape[2 + d]) + 1 for d in (0, 1))
    return on_grid(g, terms, lambda q: aten.upsample_nearest2d_backward(q, size, shape, scale_h, scale_w))


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
