"""Convolutions over one to three dimensions as products of integers, forward and backward.

Inputs and their gradients have a grid a sample, weights one a channel of the result; both factors of a weight's
gradient one a channel. Layout inside is (N, D, H, W, C), digits of an int8 unit first. Values under the taps are copied
side by side for a few samples or rows at a time, so that they are multiplied in the processor's cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from samebits.portable.grid import BITS, exact_sum, grid, scaled
from samebits.portable.products import (
    choose_unit,
    digit_type,
    product,
    sum_of_products,
    write_digits,
)

Sizes = Sequence[int]  # one number for each dimension
_CACHE = 1 << 20  # bytes of values under taps


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """Convolve (N, C, ...) with (O, C / groups, ...), or the transposed; torch's signature."""
    if x.dim() not in (3, 4, 5) or not _is_plain(x, w):
        return NotImplemented
    stride, padding, dilation = (per_dim(each, x.dim() - 2) for each in (stride, padding, dilation))
    if transposed:
        size = [
            (n - 1) * stride[d]
            - 2 * padding[d]
            + dilation[d] * (w.shape[2 + d] - 1)
            + output_padding[d]
            + 1
            for d, n in enumerate(x.shape[2:])
        ]
        result = input_gradient(x, w, size, stride, padding, dilation, groups)
    else:
        result = convolve(x, w, stride, padding, dilation, groups)
    return result if bias is None else result + bias.view(-1, *[1] * len(stride))


def convolution_backward(
    g: Tensor, x: Tensor, w: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, mask: Any,
) -> Any:  # fmt: skip
    """Return the gradients of input (N, C, ...), weight (O, C / groups, ...) and bias (O,) of `convolution`."""
    if x.dim() not in (3, 4, 5) or not _is_plain(g, x, w):
        return NotImplemented
    stride, padding, dilation = (per_dim(each, x.dim() - 2) for each in (stride, padding, dilation))
    of_input = of_weight = None
    if mask[0] and transposed:
        # An output_padding of a stride or more adds pixels that no input has reached.
        inside: Any = (..., *(slice(n) for n in x.shape[2:]))
        of_input = convolve(g, w, stride, padding, dilation, groups)[inside]
    elif mask[0]:
        of_input = input_gradient(g, w, x.shape[2:], stride, padding, dilation, groups)
    if mask[1]:
        small, large = (x, g) if transposed else (g, x)
        of_weight = weight_gradient(small, large, w.shape[2:], stride, padding, dilation, groups)
    return of_input, of_weight, exact_sum(g, (0, *range(2, g.dim()))).float() if mask[2] else None


def per_dim(values: Sequence[int], num_dims: int) -> Sequence[int]:
    """One value for each dimension; torch gives one for all too."""
    return values if len(values) == num_dims else list(values) * num_dims


def _is_plain(*values: Tensor) -> bool:
    return all(each.dtype == torch.float32 for each in values)


def convolve(
    x: Tensor, w: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """(N, C, ...) and (O, C / groups, ...) -> (N, O, ...)."""
    (n, _, *size), (o, c, *kernel) = x.shape, w.shape
    reach = [(k - 1) * apart + 1 for k, apart in zip(kernel, dilation, strict=True)]
    out = [(size[d] + 2 * padding[d] - reach[d]) // stride[d] + 1 for d in range(len(size))]
    (up, row), (w_up, column) = grid(x, BITS, range(1, x.dim())), grid(w, BITS, range(1, w.dim()))
    unit = _unit(n * math.prod(out), c * math.prod(kernel), o, groups, x.device)
    # (digits reversed, taps * C, O / groups) of each group, a transposed view
    matrix = w.new_empty(o, unit, *kernel, c, dtype=digit_type(unit))
    write_digits(w, w_up, unit, matrix.transpose(0, 1).movedim(-1, 2).unbind()[::-1])
    matrix = matrix.view(groups, o // groups, unit, -1).permute(0, 2, 3, 1)
    planes = _planes(x, up, unit, _needed(kernel, out, stride, dilation), padding)
    return _correlate(planes, matrix, kernel, out, stride, dilation, row, column)


def input_gradient(
    g: Tensor, w: Tensor, size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """Gradient (N, C, ...) of a convolution's input of a size; of a transposed convolution, its result."""
    n = g.shape[0]
    o = g.shape[1]
    c = w.shape[1]
    num_dims = len(stride)
    up, row = grid(g, BITS, range(1, g.dim()))
    # The grid needs the largest weights only; torch is slow at a maximum over several dimensions that are apart.
    largest = w.reshape(groups, o // groups, -1).abs().amax(1).view(groups, 1, c, -1)
    w_up, column = grid(largest, BITS, (3,))
    unit = _unit(
        n * math.prod(g.shape[2:]),
        o // groups * math.prod(w.shape[2:]),
        groups * c,
        groups,
        g.device,
    )
    # As the weights of a convolution from O to C channels: (digits reversed, *kernel, O, C).
    turned = w.new_empty(unit, *w.shape[2:], o, c, dtype=digit_type(unit))
    w_up = w_up.expand(-1, o // groups, -1, 1).reshape(o, c, *[1] * num_dims)
    write_digits(w, w_up, unit, turned.movedim((-2, -1), (1, 2)).unbind()[::-1])
    result = g.new_zeros(n, *size, groups * c)
    # Of a stride s, the pixels with equal remainder of s are reached by the same taps, from neighboring pixels of g:
    # each remainder is a convolution of stride 1 with these taps, in reversed order.
    for remainders in itertools.product(
        *(range(min(pair)) for pair in zip(stride, size, strict=True))
    ):
        every = [
            _taps(w.shape[2 + d], r, stride[d], padding[d], dilation[d])
            for d, r in enumerate(remainders)
        ]
        taps, before, apart = zip(*every, strict=True)
        kernel = [len(each) for each in taps]
        if not all(kernel):
            continue
        part = turned[:, *(slice(each.start, None, each.step) for each in taps)].flip(
            *range(1, num_dims + 1)
        )
        # (groups, digits reversed, taps * O / groups, C)
        matrix = (
            part.reshape(unit, -1, groups, o // groups, c)
            .permute(2, 0, 1, 3, 4)
            .reshape(groups, unit, -1, c)
        )
        out = [-(-(size[d] - r) // stride[d]) for d, r in enumerate(remainders)]
        ones = [1] * num_dims
        planes = _planes(g, up, unit, _needed(kernel, out, ones, apart), before)
        places = (slice(r, None, step) for r, step in zip(remainders, stride, strict=True))
        result[:, *places] = _correlate(
            planes, matrix, kernel, out, ones, apart, row, column
        ).movedim(1, -1)
    return result.movedim(-1, 1)


def weight_gradient(
    g: Tensor, x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """Gradient (O, C / groups, ...) of a convolution's weights, of (N, O, ...) and the input (N, C, ...)."""
    (n, o, *out), c = g.shape, x.shape[1] // groups
    others = (0, *range(2, g.dim()))
    (g_up, row), (up, column) = grid(g, BITS, others), grid(x, BITS, others)
    pixels = math.prod(out)
    unit = _unit(o, n * pixels, c * math.prod(kernel), groups, g.device)
    left = g.new_empty(groups, o // groups, n, unit, *out, dtype=digit_type(unit))
    write_digits(g, g_up, unit, left.view(o, n, unit, *out).movedim(0, 2).unbind(1))
    planes = _planes(x, up, unit, _needed(kernel, out, stride, dilation), padding, reverse=True)

    def factors() -> Iterator[tuple[Tensor, Tensor]]:
        for part, lines in _parts(planes, kernel, out):
            patches = _patches(planes[:, part], kernel, out, stride, dilation, groups)[
                :, :, :, lines
            ]
            rows = left[:, :, part, :, lines].transpose(2, 3).reshape(groups, o // groups, unit, -1)
            yield rows, patches.reshape(groups, unit, -1, c * math.prod(kernel))

    sums = sum_of_products(factors(), n * pixels).view(groups, o // groups, *kernel, c)
    ones = [1] * len(kernel)
    result = scaled(sums, row.view(groups, -1, *ones, 1), column.view(groups, 1, *ones, c)).float()
    return result.view(o, *kernel, c).movedim(-1, 1).contiguous()


def _unit(m: int, k: int, n: int, groups: int, device: torch.device) -> int:
    return choose_unit(m, k, n, device) if groups == 1 else 1


def _taps(
    kernel: int, remainder: int, stride: int, padding: int, dilation: int
) -> tuple[range, int, int]:
    """Return the taps that reach pixels of a remainder, with padding and dilation of their convolution of g."""
    step = stride // math.gcd(stride, dilation)
    first = next(
        (i for i in range(min(step, kernel)) if (i * dilation - remainder - padding) % stride == 0),
        kernel,
    )
    taps = range(first, kernel, step)
    apart = dilation // math.gcd(stride, dilation)
    # The pixel t of the remainder takes g[t - start], g[t - start - apart], ... with the taps in their order.
    start = (first * dilation - remainder - padding) // stride
    return taps, start + (len(taps) - 1) * apart, apart


def _needed(kernel: Sizes, out: Sizes, stride: Sizes, dilation: Sizes) -> list[int]:
    """The size that a convolution reads."""
    return [(n - 1) * stride[d] + (kernel[d] - 1) * dilation[d] + 1 for d, n in enumerate(out)]


def _planes(
    x: Tensor, up: Tensor, unit: int, size: Sizes, padding: Sizes, *, reverse: bool = False
) -> Tensor:
    """(N, C, ...) -> (digits, N, *size, C), with zeros around; a negative padding crops."""
    n, c, *_ = x.shape
    before = [max(p, 0) for p in padding]
    x = x[
        :, :, *(slice(max(-p, 0), max(-p, 0) + size[d] - before[d]) for d, p in enumerate(padding))
    ]
    is_full = tuple(x.shape[2:]) == tuple(size)
    planes = (x.new_empty if is_full else x.new_zeros)(unit, n, *size, c, dtype=digit_type(unit))
    inside = (slice(p, p + x.shape[2 + d]) for d, p in enumerate(before))
    inner = planes[:, :, *inside].movedim(-1, 2).unbind()
    write_digits(x, up, unit, inner[::-1] if reverse else inner)
    return planes


def _parts(planes: Tensor, kernel: Sizes, out: Sizes) -> Iterator[tuple[slice, slice]]:
    """Samples, and lines of the first dimension, whose values under taps fit into the cache; on a GPU all."""
    digits = planes.shape[0]
    n = planes.shape[1]
    c = planes.shape[-1]
    line = max(1, digits * math.prod(kernel) * math.prod(out[1:]) * c * planes.element_size())
    if planes.device.type != "cpu":
        yield slice(None), slice(None)
    elif (samples := _CACHE // (line * max(out[0], 1))) > 0:
        yield from ((slice(i, i + samples), slice(None)) for i in range(0, n, samples))
    else:
        step = max(1, _CACHE // line)
        yield from (
            (slice(i, i + 1), slice(j, j + step)) for i in range(n) for j in range(0, out[0], step)
        )


def _patches(
    planes: Tensor, kernel: Sizes, out: Sizes, stride: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """The values under each tap: (digits, N, ..., C) -> (groups, digits, N, *out, *kernel, C / groups), a view."""
    digits, n, *_, c = planes.shape
    s = planes.stride()
    steps = [s[2 + d] * each for d, each in enumerate(stride)] + [
        s[2 + d] * each for d, each in enumerate(dilation)
    ]
    return planes.as_strided(
        (groups, digits, n, *out, *kernel, c // groups),
        (c // groups, *s[:2], *steps, 1),
        planes.storage_offset(),
    )


def _correlate(
    planes: Tensor, matrix: Tensor, kernel: Sizes, out: Sizes, stride: Sizes, dilation: Sizes, row: Tensor,
    column: Tensor,
) -> Tensor:  # fmt: skip
    """Multiply patches by a matrix (groups, digits, taps * C, O / groups) -> (N, O, *out), in channels_last layout."""
    n, (groups, digits, k, o) = planes.shape[1], matrix.shape
    result = planes.new_empty(n, *out, groups * o, dtype=torch.float32)
    column = column.reshape(groups, 1, 1, o)
    for part, lines in _parts(planes, kernel, out):
        patches = _patches(planes[:, part], kernel, out, stride, dilation, groups)[:, :, :, lines]
        # digits behind the pixels: (groups, samples * pixels, digits, k)
        columns = patches.movedim(1, 2 + len(out)).reshape(groups, -1, digits, k)
        target = result[part, lines]
        sums = product(columns, matrix).view(groups, len(target), -1, o)
        target = target.view(len(target), -1, groups, o)
        target.permute(2, 0, 1, 3).copy_(scaled(sums, row[part].view(1, -1, 1, 1), column))
    return result.movedim(-1, 1)
