"""Resizing and sampling of images, and the operations of detection models. Signatures are torch's and torchvision's.

Resizing multiplies by a matrix of weights from both sides. Sampling at any places gathers the four pixels around each.
RoIAlign samples each box at places between pixels, bilinearly, and averages the samples of each bin on a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from samebits.portable.grid import exact_sum, over
from samebits.portable.pooling import on_grid, scatter_sum
from samebits.portable.products import matmul

# From the place of each pixel of the result in the image, the image's size, and its pixels for each of the result.
Weights = Callable[[Tensor, int, float], Tensor]


def _bilinear(place: Tensor, size: int, ratio: float) -> Tensor:
    """Weights of bilinear resizing, (out, size) float32."""
    place = place.clamp(min=0.0)
    low = place.floor().clamp_(max=size - 1).long()
    high = (low + 1).clamp_(max=size - 1)
    part = (place - low.double()).float()
    weights = part.new_zeros(len(place), size)
    row = torch.arange(len(place), device=place.device)
    weights[row, low] = 1.0 - part
    weights[row, high] += part
    return weights


def _cubic(x: Tensor, a: float) -> Tensor:
    """Keys' cubic kernel of distances, float64."""
    x = x.abs()
    near = ((x * (a + 2.0) - (a + 3.0)) * x) * x + 1.0
    far = (((x * a - 5.0 * a) * x) + 8.0 * a) * x - 4.0 * a
    return torch.where(x <= 1.0, near, torch.where(x < 2.0, far, 0.0))


def _bicubic(place: Tensor, size: int, ratio: float) -> Tensor:
    """Weights of bicubic resizing, (out, size) float32; pixels outside are those of the edge."""
    low = place.floor()
    weights = place.new_zeros(len(place), size)
    row = torch.arange(len(place), device=place.device)
    for tap in (-1, 0, 1, 2):
        weights[row, (low.long() + tap).clamp_(0, size - 1)] += _cubic(place - (low + tap), -0.75)
    return weights.float()


def _antialiased(kernel: Callable[[Tensor], Tensor], reach: float) -> Weights:
    """Weights by a kernel that is as wide as `reach` pixels of the result to each side, if these are larger."""

    def weights(place: Tensor, size: int, ratio: float) -> Tensor:
        center = (torch.arange(len(place), device=place.device).double() + 0.5)[:, None] * ratio
        wide = max(ratio, 1.0)
        pixel = torch.arange(size, device=place.device).double()
        first, last = ((center + sign * reach * wide + 0.5).trunc() for sign in (-1.0, 1.0))
        values = torch.where(
            (pixel >= first) & (pixel < last), kernel(over(pixel - center + 0.5, wide)), 0.0
        )
        return (values / exact_sum(values, (1,), keepdim=True)).float()

    return weights


def _resized(x: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply the dimensions of images (N, C, ...) by matrices (out, size), the last one first."""
    for dim in reversed(range(len(matrices))):
        moved = x.movedim(2 + dim, -1)
        product = matmul(moved.reshape(-1, moved.shape[-1]), matrices[dim].T)
        x = product.view(*moved.shape[:-1], -1).movedim(-1, 2 + dim)
    return x.contiguous()


def _operations(weights: Weights) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Resizing of (N, C, ...), and the gradient of its input."""

    def matrix(size: int, out: int, corners: bool, scale: float | None, like: Tensor) -> Tensor:
        i = torch.arange(out, device=like.device).double()
        if corners:
            ratio = (size - 1) / (out - 1) if out > 1 else 0.0
            return weights(i * ratio, size, ratio)
        ratio = 1.0 / scale if scale else size / out
        return weights((i + 0.5) * ratio - 0.5, size, ratio)

    def forward(x: Tensor, size: Sequence[int], corners: bool, *scales: float | None) -> Tensor:
        each = zip_longest(x.shape[2:], size, scales)
        return _resized(x, [matrix(n, out, corners, scale, x) for n, out, scale in each])

    def backward(
        g: Tensor, size: Sequence[int], shape: Sequence[int], corners: bool, *scales: float | None
    ) -> Tensor:
        each = zip_longest(shape[2:], size, scales)
        return _resized(g, [matrix(n, out, corners, scale, g).T for n, out, scale in each])

    return forward, backward


RESIZING: dict[str, Callable[..., Tensor]] = {}
for _name, _weights in {
    "upsample_linear1d": _bilinear,
    "upsample_bilinear2d": _bilinear,
    "upsample_trilinear3d": _bilinear,
    "upsample_bicubic2d": _bicubic,
    "_upsample_bilinear2d_aa": _antialiased(lambda x: (1.0 - x.abs()).clamp_(min=0.0), 1.0),
    "_upsample_bicubic2d_aa": _antialiased(lambda x: _cubic(x, -0.5), 2.0),
}.items():
    RESIZING[_name], RESIZING[f"{_name}_backward"] = _operations(_weights)


def _reflected(place: Tensor, size: int, corners: bool) -> tuple[Tensor, Tensor]:
    """Fold places at the edges, until they are within the image; and the sign of the direction."""
    low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
    if not span:
        return torch.zeros_like(place), torch.zeros_like(place)
    away = (place - low).abs()
    rest = torch.fmod(away, span)
    is_odd = torch.fmod(over(away, span).floor(), 2.0) == 1.0
    sign = torch.where((place < low) ^ is_odd, -1.0, 1.0)
    return torch.where(is_odd, span - rest + low, rest + low), sign


def _shares(x: Tensor, y: Tensor) -> Tensor:
    """Weights (4, ...) of the pixels above left, above right, below left and below right of a place between them."""
    left = 1.0 - x
    above = 1.0 - y
    return torch.stack([above * left, above * x, y * left, y * x])


class _Corners:
    """The four pixels around each place, or the nearest: indices (4 or 1, N, P), and the place between, (N, P)."""

    def __init__(self, x: Tensor, grid: Tensor, mode: int, padding: int, corners: bool) -> None:
        if mode == 2:  # bicubic
            raise NotImplementedError
        h, w = x.shape[2:]
        places = []
        self.slopes = []
        for at, size in ((grid[..., 0], w), (grid[..., 1], h)):
            place = (at + 1.0) * ((size - 1) / 2.0) if corners else ((at + 1.0) * size - 1.0) * 0.5
            slope = torch.full_like(place, (size - 1) / 2.0 if corners else size / 2.0)
            if padding == 2:
                place, sign = _reflected(place, size, corners)
                slope = slope * sign
            if padding:  # the edge
                slope = torch.where((place > 0.0) & (place < size - 1), slope, 0.0)
                place = place.clamp(0.0, size - 1)
            # Farther away all pixels are outside, as at these places.
            places.append(place.nan_to_num(-2.0).clamp(-2.0, size + 1.0).flatten(1))
            self.slopes.append(slope.flatten(1))
        self.is_nearest = mode == 1
        if self.is_nearest:
            column, row = (each.round().long()[None] for each in places)
            self.weights = torch.ones_like(places[0], dtype=x.dtype)[None]
        else:
            low = [each.floor() for each in places]
            self.tx, self.ty = (place - each for place, each in zip(places, low, strict=True))
            columns, rows = (torch.stack([each.long(), each.long() + 1]) for each in low)
            column = columns[[0, 1, 0, 1]]
            row = rows[[0, 0, 1, 1]]
            self.weights = _shares(self.tx, self.ty)
        self.is_inside = (column >= 0) & (column < w) & (row >= 0) & (row < h)
        self.index = torch.where(self.is_inside, row * w + column, 0)

    def pixels(self, x: Tensor) -> list[Tensor]:
        """Their values, each (N, C, P); 0 outside."""
        flat = x.flatten(2)
        return [
            flat.gather(2, each[:, None].expand(-1, x.shape[1], -1)) * inside[:, None]
            for each, inside in zip(self.index, self.is_inside, strict=True)
        ]


def grid_sampler_2d(x: Tensor, grid: Tensor, mode: int, padding: int, corners: bool) -> Tensor:
    """Sample images (N, C, H, W) bilinearly, or the nearest pixel, at places (N, H', W', 2)."""
    around = _Corners(x, grid, mode, padding, corners)
    parts = zip(around.pixels(x), around.weights, strict=True)
    result: Tensor
    result, *others = (each * w[:, None] for each, w in parts)
    for each in others:
        result = result + each
    return result.view(*x.shape[:2], *grid.shape[1:3])


def grid_sampler_2d_backward(
    g: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, corners: bool, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of images (N, C, H, W) and places (N, H', W', 2)."""
    around = _Corners(x, grid, mode, padding, corners)
    n, c, h, w = x.shape
    flat = g.reshape(n, c, -1)
    of_input = None
    if mask[0]:
        parts = torch.cat(
            [
                flat * (w4 * inside)[:, None]
                for w4, inside in zip(around.weights, around.is_inside, strict=True)
            ],
            2,
        )
        index = torch.cat(list(around.index), 1)[:, None].expand(-1, c, -1)
        of_input = scatter_sum(
            parts, parts.shape[2], lambda q: q.new_zeros(n, c, h * w).scatter_add_(2, index, q)
        ).view(x.shape)
    if around.is_nearest:
        return of_input, torch.zeros_like(grid)
    a, b, c4, d = around.pixels(x)
    tx = around.tx[:, None]
    ty = around.ty[:, None]
    along_x = (b - a) * (1.0 - ty) + (d - c4) * ty
    along_y = (c4 - a) * (1.0 - tx) + (d - b) * tx
    slopes = [
        exact_sum(flat * each, (1,)).float() * slope
        for each, slope in zip((along_x, along_y), around.slopes, strict=True)
    ]
    return of_input, torch.stack(slopes, -1).view(grid.shape)


_CHUNK = 1 << 22  # values of samples at a time


def roi_align(
    x: Tensor,
    boxes: Tensor,
    scale: float,
    height: int,
    width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Average (N, C, H, W) in the bins of boxes (K, 5), first its image -> (K, C, height, width)."""
    result = x.new_zeros(len(boxes), x.shape[1], height, width)
    for places, index, weights in _samples(
        x.shape, boxes, scale, (height, width), sampling_ratio, aligned
    ):
        pixels = x.transpose(0, 1).flatten(1)
        for channels in _channels(x.shape[1], index.numel()):
            taps = (
                pixels[channels][:, index.flatten()].view(-1, *index.shape).mul_(weights).unbind(1)
            )
            sampled = taps[0] + taps[1] + taps[2] + taps[3]
            means = (
                over(exact_sum(sampled, (-1,)), index.shape[-1])
                .float()
                .view(-1, len(places), height, width)
            )
            result[places, channels] = means.transpose(0, 1)
    return result


def roi_align_backward(
    g: Tensor, boxes: Tensor, scale: float, height: int, width: int, n: int, c: int, h: int, w: int,
    sampling_ratio: int, aligned: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient (N, C, H, W) of `roi_align`'s images; each channel has a grid of its own."""
    found = list(_samples((n, c, h, w), boxes, scale, (height, width), sampling_ratio, aligned))
    result = g.new_zeros(c, n * h * w)
    terms = max(1, sum(index.numel() for _, index, _ in found))
    for channels in _channels(c, terms):
        parts = [g.new_zeros(len(result[channels]), 1)]
        for places, index, weights in found:
            shares = over(g[places, channels].transpose(0, 1).flatten(1), index.shape[-1])
            parts.append((shares[:, None, :, None] * weights).flatten(1))
        values = torch.cat(parts, 1)
        index = torch.cat([boxes.new_zeros(1).long(), *(each.flatten() for _, each, _ in found)])
        result[channels] = on_grid(
            values,
            terms,
            partial(torch.index_add, values.new_zeros(len(values), n * h * w).double(), 1, index),
        )
    return result.view(c, n, h, w).transpose(0, 1).contiguous()


def _channels(c: int, num_values: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(num_values, 1))
    for start in range(0, c, step):
        yield slice(start, start + step)


def _samples(
    shape: tuple[int, ...],
    boxes: Tensor,
    scale: float,
    bins: tuple[int, int],
    sampling_ratio: int,
    aligned: bool,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for boxes with an equal number of samples a bin: their places among the boxes, the pixels around each
    sample, (4, bins, samples) in (N, H, W), and their weights, of the same shape."""
    *_, h, w = shape
    edges = boxes[:, 1:] * scale - (0.5 if aligned else 0.0)
    sizes = edges[:, 2:] - edges[:, :2]
    sizes = sizes if aligned else sizes.clamp(min=1.0)
    bin_sizes = sizes / sizes.new_tensor([bins[1], bins[0]])
    counts = (
        torch.full_like(bin_sizes, sampling_ratio)
        if sampling_ratio > 0
        else bin_sizes.ceil().clamp(min=0.0)
    )
    for pair in counts.unique(dim=0).tolist():
        count_x, count_y = map(int, pair)
        if not count_x or not count_y:
            continue  # an empty box: its average is 0
        places = (counts == counts.new_tensor(pair)).all(1).nonzero()[:, 0]
        (low_x, high_x, part_x, inside_x), (low_y, high_y, part_y, inside_y) = (
            _axis(edges[places, dim], bin_sizes[places, dim], bins[1 - dim], count, pixels)
            for dim, count, pixels in ((0, count_x, w), (1, count_y, h))
        )
        image = boxes[places, 0].long()[:, None, None, None, None] * (h * w)
        # (K, bins of y, bins of x, samples of y, samples of x)
        y = (slice(None), slice(None), None, slice(None), None)
        x = (slice(None), None, slice(None), None)
        corners = [(low_y, low_x), (low_y, high_x), (high_y, low_x), (high_y, high_x)]
        index = torch.stack([image + row[y] * w + column[x] for row, column in corners])
        weights = _shares(part_x[x], part_y[y]) * (inside_y[y] & inside_x[x])
        yield places, index.flatten(4).flatten(1, 3), weights.flatten(4).flatten(1, 3)


def _axis(
    start: Tensor, size: Tensor, bins: int, count: int, pixels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels before and behind each sample of a dimension, the place between them, and whether it is in the image."""
    bin_, sample = (torch.arange(n, device=start.device).float() for n in (bins, count))
    within = over((sample + 0.5) * size[:, None], count)
    # (K, bins, count)
    place = start[:, None, None] + bin_[:, None] * size[:, None, None] + within[:, None]
    inside = (place >= -1.0) & (place <= pixels)
    place = place.clamp(0.0, pixels - 1)
    low = place.floor().long()
    return low, (low + 1).clamp(max=pixels - 1), place - low, inside


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return the boxes (N, 4) that overlap no better one by more than a threshold, best first."""
    low, high = boxes.split(2, 1)
    areas = (high - low).prod(1)
    order = scores.argsort(descending=True, stable=True)
    kept = []
    while len(order):
        best = order[:1]
        order = order[1:]
        kept.append(best)
        sides = torch.minimum(high[order], high[best]) - torch.maximum(low[order], low[best])
        common = sides.clamp(min=0.0).prod(1)
        order = order[~(common / (areas[order] + areas[best] - common) > threshold)]
    return torch.cat(kept) if kept else scores.new_zeros(0, dtype=torch.int64)
