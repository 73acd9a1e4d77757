"""torch's CTC loss: sums over all alignments by logarithms in float64, and the gradient of the log-probabilities.

Signatures are those of torch's operations (ATen).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from samebits.portable.functions import exp64, logaddexp
from samebits.portable.operations.additions import scatter_sum

Lengths = Sequence[int] | Tensor
Loss = tuple[Tensor, Tensor]


def ctc_loss(
    scores: Tensor, targets: Tensor, times: Lengths, lengths: Lengths, blank: int = 0, zero_infinity: bool = False
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
    times, lengths = _tensor(times, scores), _tensor(lengths, scores)
    states, can_skip = _states(targets, lengths, blank)
    wide = scores.double().transpose(0, 1)
    at_states = wide.gather(2, states[:, None].expand(-1, wide.shape[1], -1))
    ways = _ways(at_states, can_skip)
    last = ways[torch.arange(len(ways), device=ways.device), (times - 1).clamp(min=0)]
    ends = last.gather(1, torch.stack([2 * lengths, (2 * lengths - 1).clamp(min=0)], 1))
    total = torch.where(lengths > 0, logaddexp(ends[:, 0], ends[:, 1]), ends[:, 0])
    return -torch.where(times > 0, total, torch.where(lengths > 0, -math.inf, 0.0)).to(scores.dtype), ways


def ctc_loss_backward(
    g: Tensor, scores: Tensor, targets: Tensor, times: Lengths, lengths: Lengths, losses: Tensor, ways: Tensor,
    blank: int, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Return the gradient of the log-probabilities, through their softmax, as torch defines it."""
    times, lengths = _tensor(times, scores), _tensor(lengths, scores)
    states, _ = _states(targets, lengths, blank)
    n, num_times, num_states = ways.shape
    wide = scores.double().transpose(0, 1)
    # The ways from each state to the end are those of the reversed text in reversed time.
    sample, time, state = (torch.arange(size, device=g.device) for size in (n, num_times, num_states))
    turned_time = (times[:, None] - 1 - time).clamp(min=0)
    turned_state = (2 * lengths[:, None] - state).clamp(min=0)
    places = sample[:, None, None], turned_time[:, :, None], turned_state[:, None]
    at_states = wide.gather(2, states[:, None].expand(-1, num_times, -1))
    turned = states.gather(1, turned_state)
    ends = _ways(at_states[places], _skips(turned, blank))[places]
    is_inside = (time < times[:, None])[:, :, None] & (state <= 2 * lengths[:, None])[:, None]
    shares = exp64(
        (ways + ends - at_states + losses.double()[:, None, None]).nan_to_num(-math.inf, math.inf, -math.inf)
    )
    shares = torch.where(is_inside & (ways > -math.inf) & (ends > -math.inf), shares, 0.0)
    index = states[:, None].expand(-1, num_times, -1)
    used = scatter_sum(shares, num_states, lambda q: q.new_zeros(wide.shape).scatter_add_(2, index, q))
    gradient = torch.where((time < times[:, None])[:, :, None], (exp64(wide) - used) * g.double()[:, None, None], 0.0)
    if zero_infinity:
        gradient = torch.where((losses == math.inf)[:, None, None], 0.0, gradient)
    return gradient.transpose(0, 1).to(scores.dtype).contiguous()


def _tensor(lengths: Lengths, like: Tensor) -> Tensor:
    return torch.as_tensor(lengths, device=like.device).long()


def _states(targets: Tensor, lengths: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """(N, S): blank, first character, blank, second, ..., blank; and which may follow the one two before."""
    longest = int(lengths.max()) if len(lengths) else 0
    if targets.dim() == 1:
        place = torch.arange(longest, device=targets.device) + (lengths.cumsum(0) - lengths)[:, None]
        targets = targets[place.clamp(max=max(len(targets) - 1, 0))] if len(targets) else targets.view(len(lengths), 0)
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
        ways[:, now, 2:] = logaddexp(logaddexp(before[:, 2:], before[:, 1:-1]), skipped) + at_states[:, now]
    return ways[:, :, 2:]
