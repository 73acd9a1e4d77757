"""An image file of the user of a line, and what the network says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from lockstep.data.images import read_rgb
from lockstep.errors import DataError
from lockstep.recipes.text.alphabet import Alphabet
from lockstep.recipes.text.config import Config, DecodeConfig
from lockstep.recipes.text.decode import read
from lockstep.recipes.text.images import GreyArray, nearest_width, normalise, read_grey, stretch
from lockstep.recipes.text.loss import ctc_loss
from lockstep.report.fonts import font_for

_TURNED = 2  # times as sure has an answer to an image turned round to be: nearly all images are upright
_TALL = 1.5  # height over width from which on an image is taken for a line on its side
_SHADES = 8  # of 256; an image with fewer between its darkest and its lightest shows nothing
_TEXT_PX, _MARGIN_PX = 24, 12
_MAX_DRAWN_PX = (8000, 4000)


def read_line(path: Path, config: Config) -> Tensor:
    """Read an image of one line: (V, 1, 32, W) float32, its views.

    The views are the image as it is and turned upside down; of one that is far taller than wide, turned to the left
    and to the right. Without `decode.turns` there is one.

    Raises:
        DataError: The file cannot be read, or shows nothing.
    """
    grey = read_grey(path)
    if int(grey.max()) - int(grey.min()) < _SHADES:
        raise DataError(f"{path} shows nothing: all of it is one shade", allowed="an image of one line of text")
    turns = _turns(grey, config.decode)
    views: list[GreyArray] = [np.ascontiguousarray(np.rot90(grey, turn)) for turn in turns]
    height, width = views[0].shape
    width_px = config.data.widths[
        int(nearest_width(config.data.widths, np.array([[width, height]], dtype=np.float64))[0])
    ]
    return normalise([stretch(view, width_px) for view in views], config.data.mean, config.data.std)


def to_prediction(logits: Tensor, alphabet: Alphabet, config: DecodeConfig) -> Mapping[str, Any]:
    """(V, T, C) logits of the views of an image -> the text of the surest one.

    The confidence is the network's probability of this text, over all alignments. View 0 is the image as it is (a
    tall one turned to the left), view 1 the other way round.
    """
    logits = logits.detach().to("cpu", torch.float32)
    texts = read(logits, alphabet, config.beam_width)
    sure = [_confidence(view, alphabet.encode(text)) for view, text in zip(logits, texts, strict=True)]
    # A view in which nothing is read may be surely empty, and is no better for it.
    best = max(range(len(texts)), key=lambda view: (bool(texts[view]), sure[view] / (_TURNED if view else 1)))
    return {"text": texts[best], "confidence": round(sure[best], 6), "upside_down": best == 1}


def draw_prediction(path: Path, prediction: Mapping[str, Any]) -> Image.Image:
    """The image with its text below."""
    picture = Image.fromarray(read_rgb(path))
    picture.thumbnail(_MAX_DRAWN_PX)  # a line of one pixel by millions would make a sheet of gigabytes
    caption = f"{prediction['text'] or '(empty)'}   {prediction['confidence']:.1%}"
    font = font_for(caption, _TEXT_PX)
    left, top, right, bottom = font.getbbox(caption)
    width = max(picture.width, math.ceil(right - left)) + 2 * _MARGIN_PX
    height = picture.height + math.ceil(bottom - top) + 3 * _MARGIN_PX
    sheet = Image.new("RGB", (width, height), "white")
    sheet.paste(picture, (_MARGIN_PX, _MARGIN_PX))
    place = (_MARGIN_PX - left, picture.height + 2 * _MARGIN_PX - top)
    ImageDraw.Draw(sheet).text(place, caption, (34, 34, 34), font)
    return sheet


def _turns(grey: GreyArray, config: DecodeConfig) -> tuple[int, ...]:
    """By how many quarters to the left each view is turned."""
    is_tall = grey.shape[0] > _TALL * grey.shape[1]
    if not config.turns:
        return (0,)
    return (1, 3) if is_tall else (0, 2)


def _confidence(logits: Tensor, classes: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    targets = torch.from_numpy(classes)[None]
    return math.exp(-float(ctc_loss(logits[None], targets, torch.tensor([len(classes)]))[0]))
