"""Pooling, padding, windows and additions by index: sums of integers on a grid by torch's own kernels in float64.

A sum of integers below 2**53 is exact in any order, so it does not matter in which order a kernel adds, or whether it
adds atomically on a GPU. Signatures are those of torch's operations (ATen).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.portable.convolution import per_dim
from samebits.portable.grid import grid, num_bits, over

aten = torch.ops.aten
_use_deterministic_algorithms = (
    torch.use_deterministic_algorithms
)  # `portable_arithmetic` keeps it on


def on_grid(
    x: Tensor, terms: int, add: Callable[[Tensor], Tensor], *, whole: bool = False
) -> Tensor:
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


@contextmanager
def in_any_order() -> Iterator[None]:
    """Let torch run kernels on a GPU that it refuses in deterministic mode: no order changes sums of integers."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    _use_deterministic_algorithms(False)
    try:
        yield
    finally:
        _use_deterministic_algorithms(was_on, warn_only=warns)


def adding(name: str, terms: Callable[..., int]) -> Callable[..., Tensor]:
    """Return torch's operation on integers, for one that only copies values of its first argument and adds them.

    Args:
        name: Of the operation.
        terms: Returns from its arguments how many values it adds at most.
    """
    operation = getattr(aten, name)

    def run(g: Tensor, *args: Any) -> Tensor:
        wide = [each.double() if isinstance(each, Tensor) else each for each in args]
        with in_any_order():
            return on_grid(g, terms(g, *args), lambda q: operation(q, *wide))

    return run


def _all_of(num_dims: int) -> Callable[..., int]:
    """The number of values of the last dimensions."""
    return lambda g, *_: math.prod(g.shape[-num_dims:])


def _nearest(g: Tensor, size: Sequence[int], shape: Sequence[int], *_: Any) -> int:
    return math.prod(-(-n // m) + 1 for n, m in zip(size, shape[2:], strict=True))


def max_pool_backward(num_dims: int) -> Callable[..., Tensor]:
    """Return the gradient of max pooling's input, over the last dimensions, and of adaptive max pooling's."""

    def run(g: Tensor, x: Tensor, *rule: Any) -> Tensor:
        # The kernel, or nothing, and at last the places of the largest.
        terms = math.prod(per_dim(rule[0], num_dims) if len(rule) > 1 else g.shape[-num_dims:])
        shape = x.shape if x.dim() == num_dims + 2 else (1, *x.shape)
        g, indices = (each.reshape(*shape[:2], -1) for each in (g, rule[-1]))
        size = math.prod(shape[2:])
        sums = on_grid(
            g, terms, lambda q: q.new_zeros(*shape[:2], size).scatter_add_(2, indices, q)
        )
        return sums.view(x.shape)

    return run


def avg_pool(num_dims: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Average pooling over the last two or three dimensions, and the gradient of its input."""
    pool = getattr(aten, f"avg_pool{num_dims}d")
    pool_backward = getattr(aten, f"avg_pool{num_dims}d_backward")

    def divisor(
        out: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
        ceil_mode: bool, count_include_pad: bool, given: int | None,
    ) -> Tensor | float:  # fmt: skip
        if given is not None:
            return float(given)
        size = list(x.shape[-num_dims:])
        if count_include_pad:
            size = [n + 2 * p for n, p in zip(size, per_dim(padding, num_dims), strict=True)]
            padding = [0]
        counts = pool(x.new_ones(1, 1, *size), kernel, stride, padding, ceil_mode, True, 1)
        # Padding may add windows, which begin behind the image.
        inside: Tensor = counts[0, 0][tuple(map(slice, out.shape[-num_dims:]))]
        return inside

    def forward(
        x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Tensor:  # fmt: skip
        terms = math.prod(per_dim(kernel, num_dims))
        sums = on_grid(x, terms, lambda q: pool(q, kernel, stride, padding, ceil_mode, True, 1))
        rule = (kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return over(sums, divisor(sums, x, *rule))

    def backward(g: Tensor, x: Tensor, *rule: Any) -> Tensor:
        kernel, stride, padding, ceil_mode, *_ = rule
        g = over(g, divisor(g, x, *rule))
        wide = x.double()
        with in_any_order():
            return on_grid(
                g, math.prod(per_dim(kernel, num_dims)),
                lambda q: pool_backward(q, wide, kernel, stride, padding, ceil_mode, True, 1),
            )  # fmt: skip

    return forward, backward


def _windows(size: int, out: int, device: torch.device) -> Tensor:
    """Which pixels each pixel of an adaptive pooling averages, (out, size) float64 of 0 and 1."""
    i = torch.arange(out, device=device)
    start = i * size // out
    stop = ((i + 1) * size + out - 1) // out
    pixel = torch.arange(size, device=device)
    return ((pixel >= start[:, None]) & (pixel < stop[:, None])).double()


def _adaptive(x: Tensor, size: Sequence[int], out: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """The windows of each of the last dimensions, and the number of pixels of each result."""
    windows = [_windows(n, m, x.device) for n, m in zip(size, out, strict=True)]
    count = x.new_ones(())
    for each in windows:
        count = count[..., None] * each.sum(1).float()
    return windows, count


def _apply(q: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply the last dimensions by a matrix each."""
    for dim, matrix in enumerate(matrices, start=-len(matrices)):
        q = (q.movedim(dim, -1) @ matrix.T).movedim(-1, dim)
    return q


def adaptive_avg_pool(x: Tensor, size: Sequence[int]) -> Tensor:
    """Adaptive average pooling of the last dimensions."""
    own = x.shape[-len(size) :]
    windows, count = _adaptive(x, own, size)
    return on_grid(x, math.prod(own), lambda q: _apply(q, windows)) / count


def adaptive_avg_pool_backward(num_dims: int, g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of adaptive average pooling's input, over the last dimensions."""
    out = g.shape[-num_dims:]
    windows, count = _adaptive(g, x.shape[-num_dims:], out)
    return on_grid(g / count, math.prod(out), lambda q: _apply(q, [each.T for each in windows]))


def _unfold_backward(g: Tensor, size: Sequence[int], dim: int, window: int, step: int) -> Tensor:
    # Each value is in at most this many windows.
    terms = -(-window // step)
    return on_grid(g, terms, lambda q: aten.unfold_backward(q, size, dim, window, step), whole=True)


POOLING: dict[str, Callable[..., Any]] = {
    "col2im": adding("col2im", _all_of(2)),
    "unfold_backward": _unfold_backward,
}
for _d in (1, 2, 3):
    for _name in (f"upsample_nearest{_d}d_backward", f"_upsample_nearest_exact{_d}d_backward"):
        POOLING[_name] = adding(_name, _nearest)
    for _name in (f"reflection_pad{_d}d_backward", f"replication_pad{_d}d_backward"):
        POOLING[_name] = adding(_name, _all_of(_d))
for _d in (2, 3):
    POOLING[f"max_pool{_d}d_with_indices_backward"] = max_pool_backward(_d)
    POOLING[f"adaptive_max_pool{_d}d_backward"] = max_pool_backward(_d)
    POOLING[f"avg_pool{_d}d"], POOLING[f"avg_pool{_d}d_backward"] = avg_pool(_d)
    POOLING[f"_adaptive_avg_pool{_d}d"] = adaptive_avg_pool
    POOLING[f"_adaptive_avg_pool{_d}d_backward"] = partial(adaptive_avg_pool_backward, _d)


def scatter_sum(x: Tensor, terms: int, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Add values by index, exactly: `add` takes them in float64; all share a grid."""
    return on_grid(x, terms, add, whole=True)


def embedding_dense_backward(
    g: Tensor, indices: Tensor, rows: int, padding: int, scale: bool
) -> Tensor:
    """Return the gradient (rows, D) of an embedding's weights."""
    if scale:
        raise NotImplementedError
    flat = g.reshape(-1, g.shape[-1])
    places = indices.reshape(-1)
    flat = flat * (places != padding)[:, None]
    return index_add(g.new_zeros(rows, flat.shape[1]), 0, places, flat)


def _length(x: Tensor, dim: int) -> int:
    return x.shape[dim] if x.dim() else 1


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Add rows of `source` at places of a dimension."""
    added = scatter_sum(
        source, _length(source, dim), lambda q: q.new_zeros(x.shape).index_add_(dim, index, q)
    )
    return x + (added if alpha == 1 else added * alpha)


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Add values at places along a dimension."""
    part = source[tuple(slice(n) for n in index.shape)]
    return x + scatter_sum(
        part, _length(index, dim), lambda q: q.new_zeros(x.shape).scatter_add_(dim, index, q)
    )


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Write or add values at places."""
    if not accumulate:
        # The method of a tensor takes no None, which stands for a whole dimension.
        written: Tensor = aten.index_put(x, list(indices), values)
        return written
    shape = x[tuple(slice(None) if each is None else each for each in indices)].shape
    values = values.expand(shape).contiguous()
    return x + scatter_sum(
        values,
        max(values.numel(), 1),
        lambda q: aten.index_put_(q.new_zeros(x.shape), list(indices), q, True),
    )


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Sum, average, or take the largest or smallest of values at places along a dimension."""
    if reduce in ("amax", "amin"):
        largest: Tensor = aten.scatter_reduce(
            x, dim, index, source, reduce, include_self=include_self
        )
        return largest
    if reduce not in ("sum", "mean"):
        raise NotImplementedError
    total = scatter_add(x if include_self else x.scatter(dim, index, 0.0), dim, index, source)
    if reduce == "sum":
        return total
    ones = torch.ones_like(x, dtype=torch.int64)
    count = ones if include_self else ones.scatter(dim, index, 0)
    return total / count.scatter_add(dim, index, torch.ones_like(index)).clamp_(min=1)
