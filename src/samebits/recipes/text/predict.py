"""Read an image file of one line of text, and make a prediction from the logits."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from samebits.data.images import EncodedImage, read_rgb
from samebits.errors import DataError
from samebits.recipes.text.alphabet import Alphabet
from samebits.recipes.text.config import Config
from samebits.recipes.text.images import GrayArray, gray, nearest_width, normalize, stretch
from samebits.recipes.text.loss import ctc_loss
from samebits.report.pictures import add_caption


def read(logits: Tensor, alphabet: Alphabet) -> list[str]:
    """Decode (N, T, C) logits to N texts by the most likely class at each time step; the blank is class 0."""
    return alphabet.decode_paths(logits.argmax(dim=2).cpu().numpy())


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


def to_prediction(logits: Tensor, alphabet: Alphabet) -> Mapping[str, Any]:
    """Make a prediction from the logits of all views of an image: the text of the most confident view.

    The confidence is the probability of this text, over all alignments.

    Args:
        logits: (V, T, C). View 0 is the image as it is (a tall one rotated to the left), view 1 upside down to it.

    Returns:
        text, confidence and upside_down.
    """
    logits = logits.detach().to("cpu", torch.float32)
    texts = read(logits, alphabet)
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
