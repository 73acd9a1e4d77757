"""Convolutions as products of integers, forward and backward.

Inputs and their gradients have a grid a sample, weights one a channel of the result; both factors of a weight's
gradient one a channel. Layout inside is (N, H, W, C), digits of an int8 unit first. Pixels under the taps are copied
side by side for a few samples at a time, so that they are multiplied in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from samebits.portable.grid import BITS, grid
from samebits.portable.products import (
    choose_unit,
    digit_type,
    product,
    sum_of_products,
    write_digits,
)

Pair = Sequence[int]
_CACHE = 1 << 20  # bytes of pixels under taps


def convolve(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Convolve (N, C, H, W) with (O, C / groups, kh, kw) -> (N, O, H', W'), float32.

    Args:
        x: The input.
        w: The weights.
        stride: In pixels, as the next two, vertically and horizontally.
        padding: Zeros on each side.
        dilation: Distance of the taps.
        groups: Number of groups.
    """
    (n, _, *size), (o, c, *kernel) = x.shape, w.shape
    out = [
        (size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    ]
    (up, row), (w_up, column) = grid(x, BITS, (1, 2, 3)), grid(w, BITS, (1, 2, 3))
    unit = _unit(n * math.prod(out), c * math.prod(kernel), o, groups, x.device)
    # (digits reversed, taps * C, O / groups) of each group, a transposed view
    matrix = w.new_empty(o, unit, *kernel, c, dtype=digit_type(unit))
    write_digits(w, w_up, unit, matrix.permute(1, 0, 4, 2, 3).unbind()[::-1])
    matrix = matrix.view(groups, o // groups, unit, -1).permute(0, 2, 3, 1)
    planes = _planes(x, up, unit, _needed(kernel, out, stride, dilation), padding)
    sums = _correlate(planes, matrix, kernel, out, stride, dilation, groups)
    return _first(sums.mul_(row).mul_(column.view(o)))


def input_gradient(
    g: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Return the gradient (N, C, H, W) of a convolution's input; of a transposed convolution, its result.

    Args:
        g: (N, O, H', W') gradient of the result.
        w: (O, C / groups, kh, kw) weights.
        size: H and W.
        stride: Of the convolution, as the next three.
        padding: In pixels.
        dilation: Distance of the taps.
        groups: Number of groups.
    """
    n = g.shape[0]
    o = g.shape[1]
    c = w.shape[1]
    up, row = grid(g, BITS, (1, 2, 3))
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
    # As the weights of a convolution from O to C channels: (digits reversed, kh, kw, O, C).
    turned = w.new_empty(unit, *w.shape[2:], o, c, dtype=digit_type(unit))
    w_up = w_up.expand(-1, o // groups, -1, 1).reshape(o, c, 1, 1)
    write_digits(w, w_up, unit, turned.permute(0, 3, 4, 1, 2).unbind()[::-1])
    result = g.new_zeros(n, *size, groups * c)
    # Of a stride s, the pixels with equal remainder of s are reached by the same taps, from neighboring pixels of g:
    # each remainder is a convolution of stride 1 with these taps, in reversed order.
    for i in range(min(stride[0], size[0])):
        for j in range(min(stride[1], size[1])):
            (rows, *top), (columns, *left) = (
                _taps(w.shape[2 + d], r, stride[d], padding[d], dilation[d])
                for d, r in ((0, i), (1, j))
            )
            if not len(rows) or not len(columns):
                continue
            part = turned[:, rows.start :: rows.step, columns.start :: columns.step].flip(1, 2)
            # (groups, digits reversed, taps * O / groups, C)
            matrix = (
                part.reshape(unit, -1, groups, o // groups, c)
                .permute(2, 0, 1, 3, 4)
                .reshape(groups, unit, -1, c)
            )
            kernel = (len(rows), len(columns))
            apart = (top[1], left[1])
            out = [-(-(size[d] - r) // stride[d]) for d, r in ((0, i), (1, j))]
            planes = _planes(g, up, unit, _needed(kernel, out, (1, 1), apart), (top[0], left[0]))
            sums = _correlate(planes, matrix, kernel, out, (1, 1), apart, groups)
            result[:, i :: stride[0], j :: stride[1]] = sums.mul_(row).mul_(column.view(groups * c))
    return _first(result)


def weight_gradient(
    g: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Return the gradient (O, C / groups, kh, kw) of a convolution's weights.

    Args:
        g: (N, O, H', W') gradient of the result.
        x: (N, C, H, W) input.
        kernel: kh and kw.
        stride: Of the convolution, as the next three.
        padding: In pixels.
        dilation: Distance of the taps.
        groups: Number of groups.
    """
    (n, o, *out), c = g.shape, x.shape[1] // groups
    (g_up, row), (up, column) = grid(g, BITS, (0, 2, 3)), grid(x, BITS, (0, 2, 3))
    pixels = math.prod(out)
    unit = _unit(o, n * pixels, c * math.prod(kernel), groups, g.device)
    left = g.new_empty(groups, o // groups, n, unit, pixels, dtype=digit_type(unit))
    write_digits(g, g_up, unit, left.view(o, n, unit, *out).permute(2, 1, 0, 3, 4).unbind())
    planes = _planes(x, up, unit, _needed(kernel, out, stride, dilation), padding, reverse=True)
    step = _samples(planes, kernel, out)

    def factors() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, n, step):
            patches = _patches(
                planes[:, start : start + step], kernel, out, stride, dilation, groups
            )
            rows = (
                left[:, :, start : start + step]
                .transpose(2, 3)
                .reshape(groups, o // groups, unit, -1)
            )
            yield rows, patches.reshape(groups, unit, -1, c * math.prod(kernel))

    sums = sum_of_products(factors(), n * pixels).float().view(groups, o // groups, *kernel, c)
    scaled = sums.mul_(row.view(groups, -1, 1, 1, 1)).mul_(column.view(groups, 1, 1, 1, c))
    return scaled.view(o, *kernel, c).permute(0, 3, 1, 2).contiguous()


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


def _first(x: Tensor) -> Tensor:
    """(N, H, W, C) -> (N, C, H, W), a view in the channels_last format."""
    return x.permute(0, 3, 1, 2)


def _needed(kernel: Pair, out: Pair, stride: Pair, dilation: Pair) -> tuple[int, int]:
    """Height and width that a convolution reads."""
    height, width = ((out[i] - 1) * stride[i] + (kernel[i] - 1) * dilation[i] + 1 for i in (0, 1))
    return height, width


def _planes(
    x: Tensor, up: Tensor, unit: int, size: Pair, padding: Pair, *, reverse: bool = False
) -> Tensor:
    """(N, C, H, W) -> (digits, N, *size, C), with zeros around; a negative padding crops."""
    n, c, *_ = x.shape
    (top, left), (y, z) = [max(p, 0) for p in padding], [max(-p, 0) for p in padding]
    x = x[:, :, y : y + size[0] - top, z : z + size[1] - left]
    is_full = tuple(x.shape[2:]) == tuple(size)
    planes = (x.new_empty if is_full else x.new_zeros)(unit, n, *size, c, dtype=digit_type(unit))
    inner = (
        planes[:, :, top : top + x.shape[2], left : left + x.shape[3]]
        .permute(0, 1, 4, 2, 3)
        .unbind()
    )
    write_digits(x, up, unit, inner[::-1] if reverse else inner)
    return planes


def _samples(planes: Tensor, kernel: Pair, out: Pair) -> int:
    """Samples whose pixels under taps fit into the cache; on a GPU all."""
    digits, n, _, _, c = planes.shape
    if planes.device.type != "cpu":
        return n
    return max(
        1, _CACHE // (digits * math.prod(kernel) * math.prod(out) * c * planes.element_size())
    )


def _patches(
    planes: Tensor, kernel: Pair, out: Pair, stride: Pair, dilation: Pair, groups: int
) -> Tensor:
    """The pixels under each tap: (digits, N, H, W, C) -> (groups, digits, N, H', W', kh, kw, C / groups), a view."""
    digits, n, _, _, c = planes.shape
    s = planes.stride()
    return planes.as_strided(
        (groups, digits, n, *out, *kernel, c // groups),
        (
            c // groups,
            s[0],
            s[1],
            s[2] * stride[0],
            s[3] * stride[1],
            s[2] * dilation[0],
            s[3] * dilation[1],
            1,
        ),
    )


def _correlate(
    planes: Tensor,
    matrix: Tensor,
    kernel: Pair,
    out: Pair,
    stride: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """Sums of integers (N, H', W', O), rounded to float32, by a matrix (groups, digits, kh * kw * C, O)."""
    n = planes.shape[1]
    o = groups * matrix.shape[-1]
    result = planes.new_empty(n, *out, o, dtype=torch.float32)
    step = _samples(planes, kernel, out)
    for start in range(0, n, step):
        patches = _patches(planes[:, start : start + step], kernel, out, stride, dilation, groups)
        columns = patches.permute(0, 2, 3, 4, 1, 5, 6, 7).reshape(groups, -1, *matrix.shape[1:3])
        sums = product(columns, matrix)  # (groups, N * H' * W', O / groups)
        result[start : start + step].view(-1, groups, o // groups).copy_(sums.transpose(0, 1))
    return result
