"""Operations of torchvision's detection models. Signatures are those of its operations.

RoIAlign samples each box at places between pixels, bilinearly, and averages the samples of each bin on a grid.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from samebits.portable.grid import exact_sum, grid, num_bits, over

_CHUNK = 1 << 22  # values of samples at a time


def roi_align(
    x: Tensor, boxes: Tensor, scale: float, height: int, width: int, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Average (N, C, H, W) in the bins of boxes (K, 5), first its image -> (K, C, height, width)."""
    result = x.new_zeros(len(boxes), x.shape[1], height, width)
    for places, index, weights in _samples(x.shape, boxes, scale, (height, width), sampling_ratio, aligned):
        pixels = x.transpose(0, 1).flatten(1)
        for channels in _channels(x.shape[1], index.numel()):
            taps = pixels[channels][:, index.flatten()].view(-1, *index.shape).mul_(weights).unbind(1)
            sampled = taps[0] + taps[1] + taps[2] + taps[3]
            means = over(exact_sum(sampled, (-1,)), index.shape[-1]).float().view(-1, len(places), height, width)
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
        up, down = grid(values, num_bits(terms), (1,))
        sums = values.new_zeros(len(values), n * h * w, dtype=torch.float64)
        sums.index_add_(1, index, (values * up).round_().double())
        result[channels] = (sums.add_(0.0) * down.double()).float()
    return result.view(c, n, h, w).transpose(0, 1).contiguous()


def _channels(c: int, num_values: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(num_values, 1))
    for start in range(0, c, step):
        yield slice(start, start + step)


def _samples(
    shape: tuple[int, ...], boxes: Tensor, scale: float, bins: tuple[int, int], sampling_ratio: int, aligned: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for boxes with an equal number of samples a bin: their places among the boxes, the pixels around each
    sample, (4, bins, samples) in (N, H, W), and their weights, of the same shape."""
    *_, h, w = shape
    edges = boxes[:, 1:] * scale - (0.5 if aligned else 0.0)
    sizes = edges[:, 2:] - edges[:, :2]
    sizes = sizes if aligned else sizes.clamp(min=1.0)
    bin_sizes = sizes / sizes.new_tensor([bins[1], bins[0]])
    counts = torch.full_like(bin_sizes, sampling_ratio) if sampling_ratio > 0 else bin_sizes.ceil().clamp(min=0.0)
    for pair in counts.unique(dim=0).tolist():
        count_x, count_y = int(pair[0]), int(pair[1])
        if not count_x or not count_y:
            continue  # an empty box: its average is 0
        places = (counts == counts.new_tensor(pair)).all(1).nonzero()[:, 0]
        low_x, high_x, part_x, inside_x = _axis(edges[places, 0], bin_sizes[places, 0], bins[1], count_x, w)
        low_y, high_y, part_y, inside_y = _axis(edges[places, 1], bin_sizes[places, 1], bins[0], count_y, h)
        image = boxes[places, 0].long()[:, None, None, None, None] * (h * w)
        # (K, bins of y, bins of x, samples of y, samples of x)
        y, x = (slice(None), slice(None), None, slice(None), None), (slice(None), None, slice(None), None)
        corners = [(low_y, low_x), (low_y, high_x), (high_y, low_x), (high_y, high_x)]
        index = torch.stack([image + row[y] * w + column[x] for row, column in corners])
        above, left = 1.0 - part_y[y], 1.0 - part_x[x]
        shares = [above * left, above * part_x[x], part_y[y] * left, part_y[y] * part_x[x]]
        weights = torch.stack(shares) * (inside_y[y] & inside_x[x])
        yield places, index.flatten(4).flatten(1, 3), weights.flatten(4).flatten(1, 3)


def _axis(start: Tensor, size: Tensor, bins: int, count: int, pixels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels before and behind each sample of a dimension, the place between them, and whether it is in the image."""
    bin_, sample = (torch.arange(n, device=start.device).float() for n in (bins, count))
    within = over((sample + 0.5) * size[:, None], count)
    place = start[:, None, None] + bin_[:, None] * size[:, None, None] + within[:, None]  # (K, bins, count)
    inside = (place >= -1.0) & (place <= pixels)
    place = place.clamp(0.0, pixels - 1)
    low = place.floor().long()
    return low, (low + 1).clamp(max=pixels - 1), place - low, inside


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return the boxes (N, 4) that overlap no better one by more than a threshold, best first."""
    left, top, right, bottom = boxes.unbind(1)
    areas = (right - left) * (bottom - top)
    order, kept = scores.argsort(descending=True, stable=True), []
    while len(order):
        best, order = order[:1], order[1:]
        kept.append(best)
        wide = (torch.minimum(right[order], right[best]) - torch.maximum(left[order], left[best])).clamp(min=0.0)
        high = (torch.minimum(bottom[order], bottom[best]) - torch.maximum(top[order], top[best])).clamp(min=0.0)
        common = wide * high
        order = order[~(common / (areas[order] + areas[best] - common) > threshold)]
    return torch.cat(kept) if kept else scores.new_zeros(0, dtype=torch.int64)
