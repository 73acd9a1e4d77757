"""From logits to text: the likeliest path, or a beam of the likeliest texts.

Legend: N lines, T time steps, C classes, blank first.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict

import numpy as np
from torch import Tensor

from lockstep.recipes.text.alphabet import BLANK, Alphabet


def greedy(logits: Tensor, alphabet: Alphabet) -> list[str]:
    """The texts of the likeliest class at each time step: (N, T, C) -> N texts."""
    return alphabet.decode_paths(logits.argmax(dim=2).cpu().numpy())


def beam_search(logits: Tensor, alphabet: Alphabet, width: int) -> list[str]:
    """The likeliest texts found by prefix beam search (Hannun et al., 2014, algorithm 1, without a language model).

    Paths that say the same are added up, so a text can win though no single path of it does.

    Args:
        logits: (N, T, C).
        alphabet: What the classes mean.
        width: Texts that are followed at a time, and classes that are looked at in a time step.
    """
    scores = logits.detach().double().log_softmax(dim=2)
    best, classes = scores.topk(min(width, scores.shape[2]), dim=2)
    rows = zip(scores[:, :, BLANK].tolist(), best.tolist(), classes.tolist(), strict=True)
    return [alphabet.decode(np.array(_search(*row, width), dtype=np.int64)) for row in rows]


def read(logits: Tensor, alphabet: Alphabet, beam_width: int = 1) -> list[str]:
    """N texts from (N, T, C) logits: greedy, or by a beam where its width is above 1."""
    return greedy(logits, alphabet) if beam_width == 1 else beam_search(logits, alphabet, beam_width)


def _search(blanks: list[float], best: list[list[float]], classes: list[list[int]], width: int) -> tuple[int, ...]:
    """The likeliest text of one line.

    Args:
        blanks: (T,) log-probabilities of blank.
        best: (T, K) those of the likeliest classes.
        classes: (T, K) which classes these are.
        width: Texts that stay after each step.
    """
    # Text -> log-probability of all paths so far that say it and end in a blank, and of those that end in its last
    # character: only the first kind can say that character once more.
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    for blank, row, names in zip(blanks, best, classes, strict=True):
        in_blank: defaultdict[tuple[int, ...], float] = defaultdict(lambda: -math.inf)
        in_character: defaultdict[tuple[int, ...], float] = defaultdict(lambda: -math.inf)
        for text, (after_blank, after_character) in beams.items():
            both = _add(after_blank, after_character)
            in_blank[text] = _add(in_blank[text], both + blank)
            for score, name in zip(row, names, strict=True):
                if name == BLANK:
                    continue
                longer = (*text, name)
                if text and text[-1] == name:
                    in_character[text] = _add(in_character[text], after_character + score)
                    in_character[longer] = _add(in_character[longer], after_blank + score)
                else:
                    in_character[longer] = _add(in_character[longer], both + score)
        together = {text: _add(in_blank[text], in_character[text]) for text in {**in_blank, **in_character}}
        # The text itself decides between equal ones.
        kept = heapq.nsmallest(width, together, key=lambda text: (-together[text], text))
        beams = {text: (in_blank[text], in_character[text]) for text in kept}
    return max(beams, key=lambda text: _add(*beams[text]))


def _add(left: float, right: float) -> float:
    """log(exp(left) + exp(right))."""
    if left < right:
        left, right = right, left
    return left if right == -math.inf else left + math.log1p(math.exp(right - left))
