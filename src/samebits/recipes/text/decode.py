"""CTC decoders: greedy and prefix beam search.

Legend: N lines, T time steps, C classes, blank first.
"""

import heapq
import math
from collections import defaultdict

import numpy as np
from torch import Tensor

from samebits.recipes.text.alphabet import BLANK, Alphabet


def greedy(logits: Tensor, alphabet: Alphabet) -> list[str]:
    """Decode (N, T, C) logits to N texts by the most likely class at each time step."""
    return alphabet.decode_paths(logits.argmax(dim=2).cpu().numpy())


def beam_search(logits: Tensor, alphabet: Alphabet, width: int) -> list[str]:
    """Decode by prefix beam search (Hannun et al., 2014, algorithm 1, without a language model).

    The probabilities of all paths of a text add up, so a text can win although none of its paths is the most likely.

    Args:
        logits: (N, T, C).
        width: Beam width: texts kept after each time step, and classes tried in each.

    Returns:
        N texts.
    """
    scores = logits.detach().double().log_softmax(dim=2)
    best, classes = scores.topk(min(width, scores.shape[2]), dim=2)
    rows = zip(scores[:, :, BLANK].tolist(), best.tolist(), classes.tolist(), strict=True)
    return [alphabet.decode(np.array(_search(*row, width), dtype=np.int64)) for row in rows]


def read(logits: Tensor, alphabet: Alphabet, beam_width: int = 1) -> list[str]:
    """Decode logits to N texts: greedily, or by beam search.

    Args:
        logits: (N, T, C).
        beam_width: 1: greedy decoding. Larger: texts kept by the beam search after each time step.
    """
    return greedy(logits, alphabet) if beam_width == 1 else beam_search(logits, alphabet, beam_width)


def _search(blanks: list[float], best: list[list[float]], classes: list[list[int]], width: int) -> tuple[int, ...]:
    """Find the most likely text of one line: (T,) scores of the blank, (T, K) of the K best classes, and these."""
    # Text -> (log-probability of its paths that end in a blank, of its paths that end in its last character). Only the
    # first kind can append that character once more; the second kind would merge with it.
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
        # Ties are broken by the text itself, so that the result does not depend on the order of the dict.
        kept = heapq.nsmallest(width, together, key=lambda text: (-together[text], text))
        beams = {text: (in_blank[text], in_character[text]) for text in kept}
    return max(beams, key=lambda text: _add(*beams[text]))


def _add(left: float, right: float) -> float:
    """Compute log(exp(left) + exp(right))."""
    if left < right:
        left, right = right, left
    return left if right == -math.inf else left + math.log1p(math.exp(right - left))
