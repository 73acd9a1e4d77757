"""Convolutions as products of integers, forward and backward.

Inputs and their gradients have a grid a sample, weights one a channel of the result; both factors of a weight's
gradient one a channel. Layout inside is (N, H, W, C), digits of an int8 unit first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.portable.grid import integers
from samebits.portable.products import choose_unit, encode, product

Pair = Sequence[int]


def convolve(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
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
    out = [(size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    (qx, row), (qw, column) = integers(x, (1, 2, 3)), integers(w, (1, 2, 3))
    unit = _unit(n * math.prod(out), c * math.prod(kernel), o, groups, x.device)
    sums = _correlate(
        encode(_last(qx), unit), _matrix(qw, unit, groups), kernel, out, stride, padding, dilation, groups
    )
    return _first(sums.float().mul_(row.view(n, 1, 1, 1)).mul_(column.view(o)))


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
    n, o, c = g.shape[0], g.shape[1], w.shape[1]
    grouped = w.view(groups, o // groups, c, *w.shape[2:])
    (qg, row), (qw, column) = integers(g, (1, 2, 3)), integers(grouped, (1, 3, 4))
    # As the weights of a convolution from O to C channels.
    qw = qw.transpose(1, 2).reshape(groups * c, o // groups, *w.shape[2:])
    unit = _unit(n * math.prod(g.shape[2:]), o // groups * math.prod(w.shape[2:]), groups * c, groups, g.device)
    planes = encode(_last(qg), unit)
    result = g.new_zeros(n, *size, groups * c)
    # Of a stride s, the pixels with equal remainder of s are reached by the same taps, from neighboring pixels of g:
    # each remainder is a convolution of stride 1 with these taps, in reversed order.
    for i in range(min(stride[0], size[0])):
        for j in range(min(stride[1], size[1])):
            taps = [_taps(w.shape[2 + d], r, stride[d], padding[d], dilation[d]) for d, r in ((0, i), (1, j))]
            if not all(len(each) for each, _, _ in taps):
                continue
            part = qw[:, :, list(taps[0][0])][:, :, :, list(taps[1][0])].flip(2, 3)
            out = [-(-(size[d] - r) // stride[d]) for d, r in ((0, i), (1, j))]
            sums = _correlate(
                planes, _matrix(part, unit, groups), part.shape[2:], out, (1, 1),
                [each[1] for each in taps], [each[2] for each in taps], groups,
            )  # fmt: skip
            scaled = sums.float().mul_(row.view(n, 1, 1, 1)).mul_(column.view(groups * c))
            result[:, i :: stride[0], j :: stride[1]] = scaled
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
    (qg, row), (qx, column) = integers(g, (0, 2, 3)), integers(x, (0, 2, 3))
    unit = _unit(o, n * math.prod(out), c * math.prod(kernel), groups, g.device)
    columns = _columns(encode(_last(qx), unit), kernel, out, stride, padding, dilation, groups)
    # (groups, pixels, digits, taps * c) -> (groups, digits reversed, pixels, taps * c)
    right = columns.permute(0, 2, 1, 3).flip(1)
    left = encode(_last(qg), unit).reshape(-1, n * math.prod(out), groups, o // groups).permute(2, 3, 0, 1)
    sums = _product(left, right).view(groups, o // groups, *kernel, c)
    scaled = sums.float().mul_(row.view(groups, -1, 1, 1, 1)).mul_(column.view(groups, 1, 1, 1, c))
    return scaled.view(o, *kernel, c).permute(0, 3, 1, 2).contiguous()


def _unit(m: int, k: int, n: int, groups: int, device: torch.device) -> int:
    return choose_unit(m, k, n, device) if groups == 1 else 1


def _taps(kernel: int, remainder: int, stride: int, padding: int, dilation: int) -> tuple[range, int, int]:
    """Return the taps that reach pixels of a remainder, with padding and dilation of their convolution of g."""
    step = stride // math.gcd(stride, dilation)
    first = next((i for i in range(min(step, kernel)) if (i * dilation - remainder - padding) % stride == 0), kernel)
    taps = range(first, kernel, step)
    apart = dilation // math.gcd(stride, dilation)
    # The pixel t of the remainder takes g[t - start], g[t - start - apart], ... with the taps in their order.
    start = (first * dilation - remainder - padding) // stride
    return taps, start + (len(taps) - 1) * apart, apart


def _last(x: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, H, W, C), contiguous."""
    return x.permute(0, 2, 3, 1).contiguous()


def _first(x: Tensor) -> Tensor:
    """(N, H, W, C) -> (N, C, H, W), a view in the channels_last format."""
    return x.permute(0, 3, 1, 2)


def _matrix(w: Tensor, unit: int, groups: int) -> Tensor:
    """(O, C, kh, kw) integers -> (groups, digits reversed, kh * kw * C, O / groups), a transposed view."""
    rows = encode(w.permute(0, 2, 3, 1).reshape(groups, w.shape[0] // groups, -1), unit)
    return rows.flip(0).permute(1, 2, 0, 3).contiguous().permute(0, 2, 3, 1)


def _columns(
    planes: Tensor, kernel: Pair, out: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """The pixels under each tap: (digits, N, H, W, C) -> (groups, N * H' * W', digits, kh * kw * C / groups)."""
    digits, n, h, w, c = planes.shape
    need = [(out[i] - 1) * stride[i] + (kernel[i] - 1) * dilation[i] + 1 for i in (0, 1)]
    if tuple(need) != (h, w) or any(padding):
        padded = planes.new_zeros(digits, n, *need, c)
        # A negative padding crops.
        (top, left), (y, x) = [max(p, 0) for p in padding], [max(-p, 0) for p in padding]
        source = planes[:, :, y : y + need[0] - top, x : x + need[1] - left]
        padded[:, :, top : top + source.shape[2], left : left + source.shape[3]] = source
        planes = padded
    else:
        planes = planes.contiguous()
    s = planes.stride()
    view = planes.as_strided(
        (groups, n, *out, digits, *kernel, c // groups),
        (c // groups, s[1], s[2] * stride[0], s[3] * stride[1], s[0], s[2] * dilation[0], s[3] * dilation[1], 1),
    )
    return view.reshape(groups, n * out[0] * out[1], digits, -1)


def _correlate(
    planes: Tensor, matrix: Tensor, kernel: Pair, out: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Sums of integers (N, H', W', O), float64."""
    columns = _columns(planes, kernel, out, stride, padding, dilation, groups)
    sums = _product(columns, matrix)  # (groups, N * H' * W', O / groups)
    if groups > 1:
        sums = sums.transpose(0, 1).contiguous()
    return sums.view(planes.shape[1], *out, -1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`product` of batches of factors; int8 units take one pair."""
    return product(left[0], right[0]).unsqueeze(0) if left.dtype == torch.int8 else product(left, right)
