"""Draw samples, an evaluation and a prediction: images with their classes in color.

Legend: H and W height and width of an image.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from PIL import Image, ImageDraw
from torch import Tensor

from samebits.data.images import ByteArray, EncodedImage
from samebits.data.samples import Batch
from samebits.metrics.segmentation import IGNORED, SegmentationMetric, label_map
from samebits.recipes.results import most_confused
from samebits.recipes.segment.config import MAX_PIXELS
from samebits.recipes.segment.data import LabeledImages
from samebits.report.fonts import font_for
from samebits.report.pictures import colors, draw_confusion, draw_sheet

TILE_PX = 150
_INK, _DARK = (34, 34, 34), (20, 20, 20)
_LINE_PX, _MARGIN_PX = 24, 12


def paint(pixels: ByteArray, labels: ByteArray) -> ByteArray:
    """Color the (H, W) classes of an (H, W, 3) image; the first keeps its colors, and ignored pixels are dark.

    Returns:
        (H, W, 3) bytes.
    """
    table = np.zeros((IGNORED + 1, 3), np.float32)
    table[1:IGNORED] = colors(IGNORED - 1)
    strength = np.full(IGNORED + 1, 0.6, np.float32)
    strength[0] = 0
    share = strength[labels][..., None]
    # Below a class the image is gray: its own colors would change the color of the class.
    gray = np.asarray(Image.fromarray(pixels).convert("L"), np.float32)[..., None]
    below = np.where(labels[..., None] > 0, gray, pixels)
    return (below * (1 - share) + table[labels] * share).round().astype(np.uint8)


def tiles(batch: Batch, classes: Sequence[str]) -> Iterator[tuple[ByteArray, str]]:
    """Yield the images of a batch, (h, w, 3) bytes with their labels in color, each with its classes."""
    for image, labels in zip(batch.inputs.numpy(), batch.targets["labels"].numpy(), strict=True):
        occurring = [classes[label] for label in np.unique(labels).tolist() if 0 < label < IGNORED]
        yield paint(image, labels), ", ".join(occurring) or classes[0]


def draw_evaluation(
    metric: SegmentationMetric, samples: LabeledImages, folder: Path, *, classes: Sequence[str]
) -> None:
    """Draw the images with the lowest IoU, each with prediction and ground truth, and the confusion matrix."""
    state = metric.state()
    folder.mkdir(parents=True, exist_ok=True)
    draw_confusion(*most_confused(np.array(state["confusion"], np.int64), classes), folder / "confusion.png")
    images, captions = [], []
    for score, index, sketch in state["worst"]:
        predicted = np.array(sketch, np.uint8)
        size = (predicted.shape[1], predicted.shape[0])
        pixels, labels = samples.source.read(index, 0)
        small = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX))
        # The nearest pixel: a mean of two classes would be another class.
        truth = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        images.append(np.concatenate([small, paint(small, predicted), paint(small, truth)], axis=1))
        captions.append(f"{samples.source.names[index]}, IoU {score:.3f}")
    title = "Lowest IoU: image, prediction, ground truth"
    draw_sheet(title, images, captions, folder / "worst.png", num_columns=2, tile_px=(3 * TILE_PX, TILE_PX))


def to_prediction(logits: Tensor, *, classes: Sequence[str]) -> Mapping[str, Any]:
    """Convert (C, h, w) logits to a prediction: each class with its share of the pixels, and its mask.

    Masks have the size of the model's input, as run lengths in COCO's form.
    """
    labels = label_map(logits, (logits.shape[1], logits.shape[2])).numpy()
    found, counts = np.unique(labels, return_counts=True)
    shares, masks = [], {}
    for label, count in sorted(zip(found.tolist(), counts.tolist(), strict=True), key=lambda pair: -pair[1]):
        shares.append({"class": classes[label], "share": round(count / labels.size, 6)})
        # COCO's encoder takes columns first.
        region = coco_mask.encode(np.asfortranarray((labels == label).astype(np.uint8)))
        masks[classes[label]] = {"size": list(region["size"]), "counts": region["counts"].decode()}
    return {"classes": shares, "masks": masks}


def draw_prediction(path: Path, prediction: Mapping[str, Any], *, classes: Sequence[str]) -> Image.Image:
    """Draw the predicted classes on an image, and below it their names with their shares.

    Raises:
        DataError: The image can't be read.
    """
    pixels = EncodedImage(path, max_pixels=MAX_PIXELS).pixels()
    size = (pixels.shape[1], pixels.shape[0])
    height, width = next(iter(prediction["masks"].values()))["size"]
    labels = np.zeros((height, width), np.uint8)
    for name, region in prediction["masks"].items():
        labels[coco_mask.decode(region) > 0] = classes.index(name)
    image = Image.fromarray(paint(pixels, np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))))
    rows, palette = prediction["classes"], [(255, 255, 255), *colors(len(classes) - 1)]
    font = font_for("".join(row["class"] for row in rows), 15)
    canvas = Image.new("RGB", (max(image.width, 240), image.height + _LINE_PX * len(rows) + 2 * _MARGIN_PX), "white")
    canvas.paste(image, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for number, row in enumerate(rows):
        y = image.height + _MARGIN_PX + number * _LINE_PX
        draw.rectangle((_MARGIN_PX, y + 4, _MARGIN_PX + 16, y + 20), palette[classes.index(row["class"])], _DARK)
        draw.text((_MARGIN_PX + 26, y + 12), f"{row['class']}  {row['share']:.1%}", _INK, font, anchor="lm")
    return canvas
