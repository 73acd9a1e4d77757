"""Connectionist temporal classification (Graves et al., ICML 2006), deterministic on every device.

`torch.nn.CTCLoss` needs log-probabilities of all classes and computes a gradient for each of them, with two more passes
than needed, and on GPUs in no fixed order of additions. Here only the classes of the text itself go through the
recursion, which runs from both ends in one batch. The rest of the gradient is the softmax.

States of the text "ab": (-, a, -, b, -), with "-" for the blank. A path stays, steps, or skips a blank between
different characters:

    time    0        1        2   ...  T-1
    -      start ->  stay ->
    a      start ->  step  ->
    -                   \\->
    b                 skip ->           end
    -                                   end

Legend: N samples, T time steps, C classes (0 is the blank), L characters of the longest text, S = 2 L + 1 states.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.data.samples import Batch


def ctc(outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    """Compute the loss of CRNN: the CTC loss of each line divided by its number of characters, averaged over lines.

    Args:
        outputs: (N, T, C) logits.
        batch: Its targets are `classes` (N, L) int64, padded by 0, and `lengths` (N,).
    """
    lengths = batch.targets["lengths"]
    losses = ctc_loss(outputs.float(), batch.targets["classes"], lengths)
    return {"ctc": (losses / lengths.clamp(min=1)).mean()}


def ctc_loss(logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """Compute the negative log-probability of each text, over all alignments.

    Args:
        logits: (N, T, C) float32 or float64, before the softmax.
        targets: (N, L) int64 classes, padded by 0.
        lengths: (N,) int64, number of characters of each text.

    Returns:
        (N,) in nats; infinite, with zero gradient, if a text needs more time steps.
    """
    losses: Tensor = _Ctc.apply(logits, targets, lengths)
    return losses


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        # (N, S) blank, first character, blank, second, ..., blank.
        states = targets.new_zeros(targets.shape[0], 2 * targets.shape[1] + 1)
        states[:, 1::2] = targets
        shares = logits.softmax(dim=2)
        # logsumexp of a row, from the fused softmax and its largest value, which is at least 1 / C.
        log_sums = logits.amax(dim=2).double() - shares.amax(dim=2).double().log()
        places = states[:, None, :].expand(-1, logits.shape[1], -1)
        scores = logits.gather(2, places).double() - log_sums[:, :, None]
        forwards, backwards, totals = _both_ways(scores, states, lengths)
        if ctx.needs_input_grad[0]:
            posts = (forwards + backwards - scores - totals[:, None, None]).exp()
            counts = (
                torch.arange(states.shape[1], device=logits.device) < 2 * lengths[:, None] + 1
            )[:, None, :]
            # -inf - (-inf) is NaN where a score is -inf: no path goes through such a state.
            posts = torch.where(counts & posts.isfinite(), posts, 0.0)
            ctx.saved = (shares, _added_up(posts, states), places, totals > -math.inf)
        return -totals.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor, None, None]:
        # In place, because this is by far the largest tensor. So backward can run only once.
        gradient, posts, places, is_possible = ctx.saved
        ctx.saved = None
        factors = (factors * is_possible)[:, None, None]
        gradient.mul_(factors)
        at_states = gradient.gather(2, places) - (posts * factors).to(gradient.dtype)
        gradient.scatter_(2, places, at_states)
        return gradient, None, None


def _both_ways(scores: Tensor, states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward and the backward recursion.

    The backward recursion is the forward one on the reversed text and time, so both run as one batch of 2 N.

    Args:
        scores: (N, T, S) log-probabilities of the classes of the states.
        states: (N, S) classes.
        lengths: (N,) numbers of characters.

    Returns:
        (N, T, S) log-probabilities of all paths that lead to a state, and of all that continue from it, both including
        the score of the state itself; and (N,) log-probabilities of the texts.
    """
    num_samples, num_times, num_states = scores.shape
    # States beyond the end are on no path to the end, so clamping their indices to 0 is harmless.
    turned_state = (2 * lengths[:, None] - torch.arange(num_states, device=scores.device)).clamp(
        min=0
    )
    turned_places = turned_state[:, None, :].expand(-1, num_times, -1)
    both = torch.cat([scores, scores.flip(1).gather(2, turned_places)]).transpose(0, 1).contiguous()
    classes = torch.cat([states, states.gather(1, turned_state)])

    may_skip = torch.zeros_like(classes, dtype=torch.bool)
    may_skip[:, 2:] = (classes[:, 2:] != 0) & (classes[:, 2:] != classes[:, :-2])
    bar = torch.where(may_skip, 0.0, -math.inf).to(scores.dtype)
    # Two impossible states before the first one, so that every state has two predecessors.
    ways = scores.new_full((num_times, 2 * num_samples, num_states + 2), -math.inf)
    ways[0, :, 2:4] = both[0, :, :2]
    for now in range(1, num_times):
        before = ways[now - 1]
        stay_or_step = torch.logaddexp(before[:, 2:], before[:, 1:-1])
        torch.add(
            torch.logaddexp(stay_or_step, before[:, :-2] + bar), both[now], out=ways[now, :, 2:]
        )

    forwards = ways[:, :num_samples, 2:].transpose(0, 1)
    turned = ways[:, num_samples:, 2:].transpose(0, 1)
    backwards = turned.flip(1).gather(2, turned_places)
    ends = ways[-1, :num_samples].gather(
        1, 2 * lengths[:, None] + torch.tensor([2, 1], device=scores.device)
    )
    return forwards, backwards, torch.logaddexp(ends[:, 0], ends[:, 1])


def _added_up(posts: Tensor, states: Tensor) -> Tensor:
    """Sum the (N, T, S) posteriors over all states of the same class, for each state.

    All states of a class then have the same value, so that the order of writes in a scatter does not matter.
    """
    same = states[:, :, None] == states[:, None, :]
    sums = posts @ same.to(posts.dtype)
    first = same.to(torch.uint8).argmax(dim=1)
    return sums.gather(2, first[:, None, :].expand_as(sums))
