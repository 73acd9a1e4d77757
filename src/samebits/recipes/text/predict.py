"""Read an image file of one line of text, and make a prediction from the logits."""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from samebits.data.images import EncodedImage, read_rgb
from samebits.errors import DataError
from samebits.recipes.text.alphabet import BLANK, Alphabet
from samebits.recipes.text.config import Config, DecodeConfig
from samebits.recipes.text.images import GrayArray, gray, nearest_width, normalize, stretch
from samebits.recipes.text.loss import ctc_loss
from samebits.report.pictures import add_caption

# CTC decoders: greedy and prefix beam search.
#
# Legend: N lines, T time steps, C classes, blank first.


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
    return (
        greedy(logits, alphabet) if beam_width == 1 else beam_search(logits, alphabet, beam_width)
    )


def _search(
    blanks: list[float], best: list[list[float]], classes: list[list[int]], width: int
) -> tuple[int, ...]:
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
        together = {
            text: _add(in_blank[text], in_character[text]) for text in {**in_blank, **in_character}
        }
        # Ties are broken by the text itself, so that the result does not depend on the order of the dict.
        kept = heapq.nsmallest(width, together, key=lambda text: (-together[text], text))
        beams = {text: (in_blank[text], in_character[text]) for text in kept}
    return max(beams, key=lambda text: _add(*beams[text]))


def _add(left: float, right: float) -> float:
    """Compute log(exp(left) + exp(right))."""
    if left < right:
        left, right = right, left
    return left if right == -math.inf else left + math.log1p(math.exp(right - left))


_TURNED = 2  # a rotated view has to be this many times as confident, because nearly all images are upright
_TALL = 1.5  # ratio of height to width above which an image counts as a line rotated by 90 degrees
_SHADES = 8  # of 256: an image with a smaller range of brightness has no text
_MAX_DRAWN_PX = (8000, 4000)


def read_line(path: Path, config: Config) -> Tensor:
    """Read an image of one line as the model's input.

    There are two views: the image as it is and upside down, or, if it is much taller than wide, rotated to the left
    and to the right. Without `decode.turns` there is one view.

    Returns:
        (V, 1, 32, W) float32, normalized.

    Raises:
        DataError: The file can't be read, or has no contrast.
    """
    line = gray(EncodedImage(path))
    if int(line.max()) - int(line.min()) < _SHADES:
        raise DataError(
            f"{path} shows nothing: all pixels have the same shade",
            allowed="an image of one line of text",
            fix="Use an image with contrast between text and background.",
        )
    # In quarter turns to the left.
    turns = (
        (0,)
        if not config.decode.turns
        else (1, 3)
        if line.shape[0] > _TALL * line.shape[1]
        else (0, 2)
    )
    # A rotated array is a view with negative strides, which OpenCV refuses.
    views: list[GrayArray] = [np.ascontiguousarray(np.rot90(line, turn)) for turn in turns]
    height, width = views[0].shape
    width_px = config.data.widths[
        int(nearest_width(config.data.widths, np.array([[width, height]], dtype=np.float64))[0])
    ]
    return normalize([stretch(view, width_px) for view in views], config.data.mean, config.data.std)


def to_prediction(logits: Tensor, alphabet: Alphabet, config: DecodeConfig) -> Mapping[str, Any]:
    """Make a prediction from the logits of all views of an image: the text of the most confident view.

    The confidence is the probability of this text, over all alignments.

    Args:
        logits: (V, T, C). View 0 is the image as it is (a tall one rotated to the left), view 1 upside down to it.

    Returns:
        text, confidence and upside_down.
    """
    logits = logits.detach().to("cpu", torch.float32)
    texts = read(logits, alphabet, config.beam_width)
    confidences = [
        _confidence(view, alphabet.encode(text)) for view, text in zip(logits, texts, strict=True)
    ]
    # An empty text can have a high confidence, so any other text is preferred.
    best = max(
        range(len(texts)),
        key=lambda view: (bool(texts[view]), confidences[view] / (_TURNED if view else 1)),
    )
    return {
        "text": texts[best],
        "confidence": round(confidences[best], 6),
        "upside_down": best == 1,
    }


def draw_prediction(path: Path, prediction: Mapping[str, Any]) -> Image.Image:
    """Draw an image with its predicted text below."""
    image = Image.fromarray(read_rgb(path))
    # an image of 1 by millions of pixels would make a sheet of gigabytes
    image.thumbnail(_MAX_DRAWN_PX)
    return add_caption(image, f"{prediction['text'] or '(empty)'}   {prediction['confidence']:.1%}")


def _confidence(logits: Tensor, classes: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    targets = torch.from_numpy(classes)[None]
    return math.exp(-float(ctc_loss(logits[None], targets, torch.tensor([len(classes)]))[0]))
