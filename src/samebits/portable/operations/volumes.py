"""Convolutions over three dimensions, by those over two: each depth of the result is a sample.

Its channels are the channels of the input times the taps over depth, in this order. The gradient of an input's depth is
the sum of those of the samples in which it is, on a grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from samebits.portable import convolution as planes
from samebits.portable.operations.pooling import on_grid

Three = Sequence[int]


def convolution(
    x: Tensor, w: Tensor, stride: Three, padding: Three, dilation: Three, transposed: bool, output_padding: Three,
    groups: int,
) -> Tensor:  # fmt: skip
    """Convolve (N, C, D, H, W) with (O, C / groups, kd, kh, kw), or the transposed; without bias."""
    if not transposed:
        return _convolve(x, w, stride, padding, dilation, groups)
    size = [
        (x.shape[2 + d] - 1) * stride[d]
        - 2 * padding[d]
        + dilation[d] * (w.shape[2 + d] - 1)
        + output_padding[d]
        + 1
        for d in range(3)
    ]
    return _input_gradient(x, w, size, stride, padding, dilation, groups)


def convolution_backward(
    g: Tensor, x: Tensor, w: Tensor, stride: Three, padding: Three, dilation: Three, transposed: bool, groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of input (N, C, D, H, W) and weight of `convolution`."""
    of_input = of_weight = None
    if mask[0] and transposed:
        depth, height, width = x.shape[2:]
        of_input = _convolve(g, w, stride, padding, dilation, groups)[:, :, :depth, :height, :width]
    elif mask[0]:
        of_input = _input_gradient(g, w, x.shape[2:], stride, padding, dilation, groups)
    if mask[1]:
        small, large = (x, g) if transposed else (g, x)
        slices = _slices(large, w.shape[2], small.shape[2], stride[0], padding[0], dilation[0])
        sizes = (w.shape[3:], stride[1:], padding[1:], dilation[1:])
        of_weight = planes.weight_gradient(_samples(small), slices, *sizes, groups).reshape(w.shape)
    return of_input, of_weight


def _convolve(
    x: Tensor, w: Tensor, stride: Three, padding: Three, dilation: Three, groups: int
) -> Tensor:
    depth = (x.shape[2] + 2 * padding[0] - dilation[0] * (w.shape[2] - 1) - 1) // stride[0] + 1
    slices = _slices(x, w.shape[2], depth, stride[0], padding[0], dilation[0])
    result = planes.convolve(slices, w.flatten(1, 2), stride[1:], padding[1:], dilation[1:], groups)
    return _volumes(result, depth)


def _input_gradient(
    g: Tensor, w: Tensor, size: Three, stride: Three, padding: Three, dilation: Three, groups: int
) -> Tensor:
    n = len(g)
    taps = w.shape[2]
    depth = g.shape[2]
    slices = planes.input_gradient(
        _samples(g), w.flatten(1, 2), size[1:], stride[1:], padding[1:], dilation[1:], groups
    )
    parts = slices.reshape(n, depth, -1, taps, *size[1:]).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
    places = _places(taps, depth, stride[0], dilation[0], g.device).flatten()
    whole = (n, parts.shape[1], max(size[0] + padding[0], int(places.max()) + 1), *size[1:])
    summed = on_grid(parts, taps, lambda q: q.new_zeros(whole).index_add_(2, places, q))
    return summed[:, :, padding[0] : padding[0] + size[0]]


def _places(taps: int, depth: int, stride: int, dilation: int, device: torch.device) -> Tensor:
    """Depth in the padded input of each tap and depth of the result, (taps, depth)."""
    tap = torch.arange(taps, device=device)
    out = torch.arange(depth, device=device)
    return tap[:, None] * dilation + out * stride


def _slices(x: Tensor, taps: int, depth: int, stride: int, padding: int, dilation: int) -> Tensor:
    """(N, C, D, H, W) -> (N * D', C * taps, H, W): what is under the taps of each depth of the result."""
    padded = pad(x, (0, 0, 0, 0, padding, padding))
    under: Tensor = padded[:, :, _places(taps, depth, stride, dilation, x.device)]
    return under.permute(0, 3, 1, 2, 4, 5).reshape(len(x) * depth, -1, *x.shape[3:])


def _samples(x: Tensor) -> Tensor:
    """(N, C, D, H, W) -> (N * D, C, H, W)."""
    return x.transpose(1, 2).flatten(0, 1)


def _volumes(x: Tensor, depth: int) -> Tensor:
    """(N * D, C, H, W) -> (N, C, D, H, W)."""
    volumes: Tensor = x.unflatten(0, (-1, depth)).transpose(1, 2)
    return volumes
