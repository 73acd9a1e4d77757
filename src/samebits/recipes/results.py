"""What recipes share to show results: sheets of samples, and the likeliest classes.

Legend: N samples, C classes, H and W height and width of an image.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from torch import Tensor

from samebits.data.samples import Batch, Samples
from samebits.metrics.classification import Accuracy
from samebits.report.pictures import draw_confusion, draw_sheet, font_for

ByteArray = npt.NDArray[np.uint8]
_MOST_CLASSES = 40  # of a confusion matrix
_INK = (34, 34, 34)
_ROW_PX = 26
_MARGIN_PX = 12

#: Makes the tiles of a batch, (H, W) or (H, W, 3) bytes, each with its label.
Tiles = Callable[[Batch], Iterable[tuple[ByteArray, str]]]


def draw_samples(batches: Sequence[Batch], path: Path, *, tiles: Tiles, **sheet: Any) -> None:
    """Draw training samples as the model sees them, each with its label."""
    pairs = [pair for batch in batches for pair in tiles(batch)]
    images = [tile for tile, _ in pairs]
    captions = [caption for _, caption in pairs]
    draw_sheet(
        "Training samples after augmentation, with their labels", images, captions, path, **sheet
    )


def draw_worst(
    title: str,
    worst: Sequence[tuple[int, str]],
    samples: Samples,
    path: Path,
    *,
    tiles: Tiles,
    **sheet: Any,
) -> None:
    """Draw validation samples, each with a caption. `tiles`: makes the tiles of a batch; their labels are not used."""
    images = []
    for index, _ in worst:
        # One by one, since samples may have several widths. Keys of zero: they draw no random numbers.
        batch = samples.batch(np.array([index], np.int64), np.zeros(1, np.uint64))
        images += [tile for tile, _ in tiles(batch)]
    draw_sheet(title, images, [caption for _, caption in worst], path, **sheet)


def draw_classes(
    metric: Accuracy, samples: Samples, folder: Path, *, classes: Sequence[str], tiles: Tiles
) -> None:
    """Draw the validation images with the largest loss, and the confusion matrix unless there are too many classes."""
    state = metric.state()
    if "confusion" in state:
        draw_matrix(state["confusion"], classes, folder)
    worst = [
        (
            index,
            f"prediction {classes[choice]},\nground truth {classes[label]}"
            if label != choice
            else f"{classes[label]}, loss {loss:.2f}",
        )
        for loss, index, label, choice in state["worst"]
    ]
    draw_worst(
        "Validation images with the largest loss", worst, samples, folder / "worst.png", tiles=tiles
    )


def draw_shares(
    image: Image.Image, rows: Sequence[tuple[str, float, tuple[int, int, int]]]
) -> Image.Image:
    """Draw rows of a name, its share and a color below an image: each share as a bar in its color."""
    font = font_for("".join(name for name, _, _ in rows), 15)
    size = (max(image.width, 360), image.height + _ROW_PX * len(rows) + 2 * _MARGIN_PX)
    canvas = Image.new("RGB", size, "white")
    canvas.paste(image, (0, 0))
    draw = ImageDraw.Draw(canvas)
    left = 2 * _MARGIN_PX + max(int(font.getlength(name)) for name, _, _ in rows)
    for number, (name, share, color) in enumerate(rows):
        top = image.height + _MARGIN_PX + number * _ROW_PX
        middle = top + _ROW_PX // 2
        right = left + max(1, int((canvas.width - left - 70) * share))
        draw.text((left - 10, middle), name, _INK, font, anchor="rm")
        draw.rectangle((left, top + 5, right, top + _ROW_PX - 5), color, _INK)
        draw.text((right + 6, middle), f"{share:.1%}", _INK, font, anchor="lm")
    return canvas


def draw_matrix(matrix: Sequence[Sequence[int]], classes: Sequence[str], folder: Path) -> None:
    """Draw a (C, C) confusion matrix, unless there are too many classes for an image."""
    if len(classes) <= _MOST_CLASSES:
        draw_confusion(matrix, classes, folder / "confusion.png")


def gray_tiles(batch: Batch, mean: float, std: float) -> list[ByteArray]:
    """Undo the normalization of gray images: inputs (N, 1, H, W) float32 -> N arrays (H, W) of bytes."""
    return list(
        np.clip((batch.inputs[:, 0].numpy() * std + mean) * 255, 0, 255).round().astype(np.uint8)
    )


def top_classes(logits: Tensor, classes: Sequence[Any], num_top: int) -> dict[str, Any]:
    """Make a prediction from (C,) logits: the class, its probability, and the most likely classes.

    Args:
        logits: (C,) scores.
        num_top: How many classes to return, at most.
    """
    probabilities = logits.detach().flatten().double().softmax(dim=0)
    values, labels = probabilities.topk(min(num_top, len(classes)))
    top = [
        {"class": classes[label], "probability": round(value, 6)}
        for label, value in zip(labels.tolist(), values.tolist(), strict=True)
    ]
    return {**top[0], "top": top}
