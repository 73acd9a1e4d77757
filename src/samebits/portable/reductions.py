"""Normalization, softmax, losses, means, norms and CTC: sums on a grid, the rest elementwise.

Signatures are those of torch's operations (ATen).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.portable.functions import exp, exp64, log64, logaddexp, rsqrt, sqrt
from samebits.portable.grid import exact_sum, over, sum_of_squares
from samebits.portable.pooling import scatter_sum

Dims = int | Sequence[int] | None
# Of input, weight and bias; None for those that are not asked for.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def dims_of(x: Tensor, dim: Dims) -> list[int]:
    """Return dimensions as a list from 0; all, where an operation names none; a single value has none to name."""
    if not x.dim() or dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.dim()))
    return [each % x.dim() for each in ([dim] if isinstance(dim, int) else dim)]


def others(x: Tensor, dim: int) -> list[int]:
    """Return all dimensions but one."""
    return [each for each in range(x.dim()) if each != dim % x.dim()]


def sum_(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over dimensions."""
    return exact_sum(x, dims_of(x, dim), keepdim=keepdim).to(dtype or x.dtype)


def mean(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Mean over dimensions."""
    dims = dims_of(x, dim)
    return over(exact_sum(x, dims, keepdim=keepdim), math.prod(x.shape[i] for i in dims)).to(
        dtype or x.dtype
    )


def var_mean(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean over dimensions."""
    dims = dims_of(x, dim)
    n = math.prod(x.shape[i] for i in dims)
    center = mean(x, dims, keepdim=True)
    deviation = x - center
    total = exact_sum(deviation * deviation, dims, keepdim=keepdim)
    spread = over(total, max(n - (1 if correction is None else correction), 0))
    return spread.to(x.dtype), center if keepdim else center.squeeze(dims)


def norm(
    x: Tensor,
    p: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Norms 1, 2 and infinity."""
    x, dims = x.to(dtype or x.dtype), dims_of(x, dim)
    if p == 2:
        if len(dims) == x.dim() and not keepdim:
            return sqrt(sum_of_squares(x).to(x.dtype))
        wide = x.double()
        return sqrt(exact_sum(wide * wide, dims, keepdim=keepdim).to(x.dtype))
    if p == 1:
        return exact_sum(x.abs(), dims, keepdim=keepdim).to(x.dtype)
    if math.isinf(p):
        choose = torch.amax if p > 0 else torch.amin
        return choose(x.abs(), dims, keepdim=keepdim)
    raise NotImplementedError


def _wide(values: Tensor, dim: int) -> Tensor:
    """(C,) -> (1, C, 1, ...), to be combined with (N, C, ...)."""
    return values.view(1, -1, *[1] * (dim - 2))


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalize (N, C, ...) by the statistics of the batch or the running ones; update these in training."""
    if not training:
        center, inverse = _of_running(running_mean, running_var, eps)
        empty = x.new_empty(0)
        return _scaled(x - _wide(center, x.dim()), inverse, weight, bias), empty, empty
    dims = others(x, 1)
    n = x.numel() // x.shape[1]
    deviation, *statistics = _statistics(x, dims, eps)
    center, variance, inverse = (each.view(-1) for each in statistics)
    for running, new in (
        (running_mean, center),
        (running_var, (variance * (n / max(n - 1, 1))).float()),
    ):
        if running is not None:
            running.mul_(1 - momentum).add_(new * momentum)
    return _scaled(deviation, inverse, weight, bias), center, inverse


def _of_running(mean: Tensor | None, variance: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Running mean, and 1 / root of the running variance, (C,) each."""
    assert mean is not None
    assert variance is not None
    return mean, rsqrt(variance + eps)


def _statistics(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, ...]:
    """Deviations from the mean over dimensions; the mean, the float64 variance and 1 / its root, of size 1 there."""
    n = math.prod(x.shape[dim] for dim in dims)
    center = over(exact_sum(x, dims, keepdim=True), n).float()
    deviation = x - center
    variance = over(exact_sum(deviation * deviation, dims, keepdim=True), n)
    return deviation, center, variance, rsqrt(variance.float() + eps)


def _scaled(
    deviation: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    scale = _wide(inverse if weight is None else inverse * weight, deviation.dim())
    return _affine(deviation, scale, None if bias is None else _wide(bias, deviation.dim()))


def batch_norm_backward(
    g: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    center: Tensor | None, inverse: Tensor | None, training: bool, eps: float, mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Return the gradients of input, weight and bias of `batch_norm`."""
    if not training:
        center, inverse = _of_running(running_mean, running_var, eps)
    assert center is not None
    assert inverse is not None
    dims = others(x, 1)
    n = x.numel() // x.shape[1]
    normal = (x - _wide(center, x.dim())).mul_(_wide(inverse, x.dim()))
    sum_g = exact_sum(g, dims, keepdim=True)
    sum_gx = exact_sum(g * normal, dims, keepdim=True)
    gradient = None
    if mask[0]:
        scale = _wide(inverse if weight is None else inverse * weight, x.dim())
        if training:
            gradient = _centered(g, normal, sum_g, sum_gx, n).mul_(scale)
        else:
            gradient = g * scale
    of_weight, of_bias = (each.float().view(-1) for each in (sum_gx, sum_g))
    return gradient, of_weight if mask[1] else None, of_bias if mask[2] else None


def _centered(g: Tensor, normal: Tensor, sum_g: Tensor, sum_gx: Tensor, n: int) -> Tensor:
    """Take from gradients of normalized values what mean and variance take, from the sums over n values."""
    return (g - over(sum_g, n).float()).sub_(normal * over(sum_gx, n).float())


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize over the last dimensions."""
    dims = range(x.dim() - len(shape), x.dim())
    deviation, center, _, inverse = _statistics(x, dims, eps)
    return _affine(deviation.mul_(inverse), weight, bias), center, inverse


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x * weight + bias, in place."""
    x = x if weight is None else x.mul_(weight)
    return x if bias is None else x.add_(bias)


def layer_norm_backward(
    g: Tensor, x: Tensor, shape: Sequence[int], center: Tensor, inverse: Tensor, weight: Tensor | None,
    bias: Tensor | None, mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Return the gradients of input, weight and bias of `layer_norm`."""
    dims = range(x.dim() - len(shape), x.dim())
    others = range(x.dim() - len(shape))
    n = math.prod(shape)
    normal = (x - center).mul_(inverse)
    gradient = None
    if mask[0]:
        inner = g if weight is None else g * weight
        sum_g, sum_gx = (exact_sum(x, dims, keepdim=True) for x in (inner, inner * normal))
        gradient = _centered(inner, normal, sum_g, sum_gx, n).mul_(inverse)
    of_weight = exact_sum(g * normal, others).float() if mask[1] else None
    return gradient, of_weight, exact_sum(g, others).float() if mask[2] else None


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    c: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize (N, C, ...) over groups of channels."""
    flat = x.reshape(n, groups, c // groups * size)
    normal, center, inverse = layer_norm(flat, flat.shape[2:], None, None, eps)
    weight, bias = (None if each is None else each.view(1, c, 1) for each in (weight, bias))
    result = _affine(normal.view(n, c, size), weight, bias)
    return result.view(x.shape), center.view(n, groups), inverse.view(n, groups)


def group_norm_backward(
    g: Tensor, x: Tensor, center: Tensor, inverse: Tensor, weight: Tensor | None, n: int, c: int, size: int,
    groups: int, mask: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Return the gradients of input, weight and bias of `group_norm`."""
    shape = (n, groups, c // groups * size)
    center = center.view(n, groups, 1)
    inverse = inverse.view(n, groups, 1)
    normal = (x.reshape(shape) - center).mul_(inverse).view(n, c, size)
    g = g.reshape(n, c, size)
    inner = g if weight is None else g * weight.view(1, c, 1)
    gradient, *_ = layer_norm_backward(
        inner.reshape(shape),
        x.reshape(shape),
        shape[2:],
        center,
        inverse,
        None,
        None,
        (mask[0], False, False),
    )
    of_weight = exact_sum(g * normal, (0, 2)).float() if mask[1] else None
    result = None if gradient is None else gradient.view(x.shape)
    return result, of_weight, exact_sum(g, (0, 2)).float() if mask[2] else None


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Logarithm of the softmax over a dimension."""
    if not x.numel():
        return x.clone()
    shifted = (x - x.amax(dim, keepdim=True)).double()
    return shifted.sub_(log64(exact_sum(exp64(shifted), (dim,), keepdim=True))).to(x.dtype)


def log_softmax_backward(g: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of `log_softmax`'s argument."""
    return (g.double() - exp64(result.double()).mul_(exact_sum(g, (dim,), keepdim=True))).to(dtype)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Softmax over a dimension. Where all are -infinity, NaN."""
    if not x.numel():
        return x.clone()
    e = exp((x - x.amax(dim, keepdim=True)).double())
    return (e / exact_sum(e, (dim,), keepdim=True)).to(x.dtype)


def softmax_backward(g: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of `softmax`'s argument."""
    return ((g - exact_sum(g * result, (dim,), keepdim=True).float()) * result).to(dtype)


def _classes(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[int, Tensor, Tensor, Tensor]:
    """The dimension of classes, which targets count, their places in it, and their weights."""
    dim = 0 if x.dim() == 1 else 1
    is_used = target != ignore_index
    place = torch.where(is_used, target, 0).unsqueeze(dim)
    weights = torch.ones_like(x.select(dim, 0)) if weight is None else weight[place.squeeze(dim)]
    return dim, is_used, place, weights * is_used


def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of (N, C) or (C,), or of (N, C, H, W), with the sum of the weights."""
    classes, is_used, place, weights = _classes(x, target, weight, ignore_index)
    losses = torch.where(is_used, -x.gather(classes, place).squeeze(classes) * weights, 0.0)
    if reduction == 0:
        return losses, x.new_zeros(())
    every = range(losses.dim())
    total = exact_sum(weights, every)
    loss = exact_sum(losses, every)
    return (loss / total if reduction == 1 else loss).to(x.dtype), total.to(x.dtype)


def nll_loss_backward(
    g: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total: Tensor,
) -> Tensor:
    """Return the gradient of `nll_loss`'s argument."""
    classes, is_used, place, weights = _classes(x, target, weight, ignore_index)
    each = -g * weights
    if reduction == 1:
        each = each / total
    each = torch.where(is_used, each, 0.0)
    return torch.zeros_like(x).scatter(classes, place, each.unsqueeze(classes))


Lengths = Sequence[int] | Tensor
Loss = tuple[Tensor, Tensor]


def ctc_loss(
    scores: Tensor,
    targets: Tensor,
    times: Lengths,
    lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Loss:
    """Compute the negative log-probability of each text.

    Args:
        scores: (T, N, C) log-probabilities.
        targets: (N, L) classes, or those of all texts one after the other.
        times: (N,) number of time steps of each.
        lengths: (N,) number of characters of each.
        blank: Class of the blank.
        zero_infinity: Handled by torch, where it computes gradients.

    Returns:
        (N,), and (N, T, S) logarithms of all ways to each state until each time.
    """
    times = _tensor(times, scores)
    lengths = _tensor(lengths, scores)
    states, can_skip = _states(targets, lengths, blank)
    wide = scores.double().transpose(0, 1)
    at_states = wide.gather(2, states[:, None].expand(-1, wide.shape[1], -1))
    ways = _ways(at_states, can_skip)
    last = ways[torch.arange(len(ways), device=ways.device), (times - 1).clamp(min=0)]
    ends = last.gather(1, torch.stack([2 * lengths, (2 * lengths - 1).clamp(min=0)], 1))
    total = torch.where(lengths > 0, logaddexp(ends[:, 0], ends[:, 1]), ends[:, 0])
    return -torch.where(times > 0, total, torch.where(lengths > 0, -math.inf, 0.0)).to(
        scores.dtype
    ), ways


def ctc_loss_backward(
    g: Tensor, scores: Tensor, targets: Tensor, times: Lengths, lengths: Lengths, losses: Tensor, ways: Tensor,
    blank: int, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Return the gradient of the log-probabilities, through their softmax, as torch defines it."""
    times = _tensor(times, scores)
    lengths = _tensor(lengths, scores)
    states, _ = _states(targets, lengths, blank)
    n, num_times, num_states = ways.shape
    wide = scores.double().transpose(0, 1)
    # The ways from each state to the end are those of the reversed text in reversed time.
    sample, time, state = (
        torch.arange(size, device=g.device) for size in (n, num_times, num_states)
    )
    turned_time = (times[:, None] - 1 - time).clamp(min=0)
    turned_state = (2 * lengths[:, None] - state).clamp(min=0)
    places = sample[:, None, None], turned_time[:, :, None], turned_state[:, None]
    at_states = wide.gather(2, states[:, None].expand(-1, num_times, -1))
    turned = states.gather(1, turned_state)
    ends = _ways(at_states[places], _skips(turned, blank))[places]
    is_inside = (time < times[:, None])[:, :, None] & (state <= 2 * lengths[:, None])[:, None]
    shares = exp64(
        (ways + ends - at_states + losses.double()[:, None, None]).nan_to_num(
            -math.inf, math.inf, -math.inf
        )
    )
    shares = torch.where(is_inside & (ways > -math.inf) & (ends > -math.inf), shares, 0.0)
    index = states[:, None].expand(-1, num_times, -1)
    used = scatter_sum(
        shares, num_states, lambda q: q.new_zeros(wide.shape).scatter_add_(2, index, q)
    )
    gradient = torch.where(
        (time < times[:, None])[:, :, None], (exp64(wide) - used) * g.double()[:, None, None], 0.0
    )
    if zero_infinity:
        gradient = torch.where((losses == math.inf)[:, None, None], 0.0, gradient)
    return gradient.transpose(0, 1).to(scores.dtype).contiguous()


def _tensor(lengths: Lengths, like: Tensor) -> Tensor:
    return torch.as_tensor(lengths, device=like.device).long()


def _states(targets: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """(N, S): blank, first character, blank, second, ..., blank; and which may follow the one two before."""
    longest = int(lengths.max()) if len(lengths) else 0
    if targets.dim() == 1:
        place = (
            torch.arange(longest, device=targets.device) + (lengths.cumsum(0) - lengths)[:, None]
        )
        targets = (
            targets[place.clamp(max=max(len(targets) - 1, 0))]
            if len(targets)
            else targets.view(len(lengths), 0)
        )
    states = targets.new_full((len(lengths), 2 * longest + 1), blank, dtype=torch.int64)
    is_used = torch.arange(longest, device=targets.device) < lengths[:, None]
    states[:, 1::2] = torch.where(is_used, targets[:, :longest], blank)
    return states, _skips(states, blank)


def _skips(states: Tensor, blank: int) -> Tensor:
    can_skip = torch.zeros_like(states, dtype=torch.bool)
    can_skip[:, 2:] = (states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2])
    return can_skip


def _ways(at_states: Tensor, can_skip: Tensor) -> Tensor:
    """Logarithms of the sums over all ways from the first two states, of (N, T, S) log-probabilities."""
    n, num_times, num_states = at_states.shape
    # Two impossible states before the first one, so that every state has two predecessors.
    ways = at_states.new_full((n, num_times, num_states + 2), -math.inf)
    ways[:, 0, 2:4] = at_states[:, 0, :2]
    for now in range(1, num_times):
        before = ways[:, now - 1]
        skipped = torch.where(can_skip, before[:, :-2], -math.inf)
        ways[:, now, 2:] = (
            logaddexp(logaddexp(before[:, 2:], before[:, 1:-1]), skipped) + at_states[:, now]
        )
    return ways[:, :, 2:]
