"""Draw training samples, an evaluation and a prediction."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from samebits.data.images import read_rgb
from samebits.data.samples import Batch, Samples
from samebits.metrics.classification import Accuracy
from samebits.metrics.confusion import Counts
from samebits.report.fonts import font_for
from samebits.report.pictures import draw_confusion, draw_sheet

# A larger confusion matrix is not readable as an image.
_MAX_CLASSES = 40
_NUM_MISTAKES = 5  # of a class, where a matrix would be too large


def draw_evaluation(metric: Accuracy, samples: Samples, folder: Path, *, classes: Sequence[str]) -> None:
    """Draw the confusion matrix and the images with the largest loss, and write the counts to confusion.csv.

    With too many classes for a matrix, the file has the most frequent mistakes of each class. With too many different
    mistakes, it has none, and no matrix is drawn.

    Args:
        metric: The merged metric of the evaluation.
        samples: The validation images.
        folder: Folder for the PNG files and confusion.csv.
        classes: Names of the classes.
    """
    state = metric.state()
    counts, rows = Counts.of(state), state["worst"]
    folder.mkdir(parents=True, exist_ok=True)
    if "confusion" in state:
        _write_matrix(state["confusion"], classes, folder / "confusion.csv")
    else:
        _write_mistakes(counts, classes, folder / "confusion.csv")
    if counts.has_pairs:
        draw_confusion(*_most_confused(counts, classes), folder / "confusion.png")
    else:
        (folder / "confusion.png").unlink(missing_ok=True)  # of an earlier evaluation
    indices = np.array([index for _, index, _, _ in rows], dtype=np.int64)
    tiles = samples.batch(indices, np.zeros(len(indices), dtype=np.uint64)).inputs.numpy()
    captions = [
        f"prediction {classes[choice]},\nground truth {classes[label]}"
        if label != choice
        else f"{classes[label]}, loss {loss:.2f}"
        for loss, _, label, choice in rows
    ]
    draw_sheet("Validation images with the largest loss", list(tiles), captions, folder / "worst.png")


def draw_samples(batches: Sequence[Batch], path: Path, *, classes: Sequence[str]) -> None:
    """Draw training samples after cropping and flipping, each with its class.

    Args:
        batches: Batches as the dataset returned them: inputs (N, S, S, 3) bytes.
        path: The PNG file to write.
        classes: Names of the classes.
    """
    tiles = [tile for batch in batches for tile in batch.inputs.numpy()]
    captions = [classes[label] for batch in batches for label in batch.targets.tolist()]
    draw_sheet("Training samples after augmentation, with their labels", tiles, captions, path)


def _write_matrix(counts: Sequence[Sequence[int]], classes: Sequence[str], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["ground truth", "samples", "correct", *(f"predicted {name}" for name in classes)])
        for label, (name, row) in enumerate(zip(classes, counts, strict=True)):
            table.writerow([name, sum(row), row[label], *row])


def _write_mistakes(counts: Counts, classes: Sequence[str], path: Path) -> None:
    bounds = np.searchsorted(counts.labels, np.arange(len(classes) + 1))
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["ground truth", "samples", "correct", "most frequent mistakes"])
        for label, name in enumerate(classes):
            pairs = slice(bounds[label], bounds[label + 1])
            numbers, predictions = counts.counts[pairs], counts.predictions[pairs]
            order = np.argsort(-numbers, kind="stable")[:_NUM_MISTAKES]
            mistakes = "; ".join(f"{classes[predictions[at]]} ({numbers[at]})" for at in order)
            table.writerow([name, counts.samples[label], counts.correct[label], mistakes])


def _most_confused(counts: Counts, classes: Sequence[str]) -> tuple[Sequence[Sequence[int]], Sequence[str]]:
    """Return the matrix; of many classes those with the most mistakes, and all others as one class."""
    num_classes = len(classes)
    row, names = np.arange(num_classes), list(classes)
    if num_classes > _MAX_CLASSES:
        mistakes = counts.samples - counts.correct
        np.add.at(mistakes, counts.predictions, counts.counts)
        shown = np.sort(np.argsort(-mistakes, kind="stable")[: _MAX_CLASSES - 1])
        row = np.full(num_classes, len(shown))
        row[shown] = np.arange(len(shown))
        names = [*(classes[label] for label in shown), f"{num_classes - len(shown)} others"]
    matrix = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(matrix, (row, row), counts.correct)
    np.add.at(matrix, (row[counts.labels], row[counts.predictions]), counts.counts)
    return matrix.tolist(), names


def draw_prediction(path: Path, prediction: Mapping[str, Any]) -> Image.Image:
    """Draw an image with the most likely classes below it, each with a bar for its probability.

    Args:
        path: The image file.
        prediction: The result of `to_prediction` for it.
    """
    image = Image.fromarray(read_rgb(path))
    image.thumbnail((720, 720))
    width, line_px, margin_px = max(image.width, 360), 26, 12
    top = prediction["top"]
    font = font_for("".join(entry["class"] for entry in top), 15)
    canvas = Image.new("RGB", (width, image.height + line_px * len(top) + 2 * margin_px), "white")
    canvas.paste(image, ((width - image.width) // 2, 0))
    draw = ImageDraw.Draw(canvas)
    left = margin_px + 10 + max(int(font.getlength(entry["class"])) for entry in top)
    for rank, entry in enumerate(top):
        y = image.height + margin_px + rank * line_px
        draw.text((left - 10, y + line_px // 2), entry["class"], (34, 34, 34), font, anchor="rm")
        length = max(1, int((width - left - 70) * entry["probability"]))
        draw.rectangle((left, y + 5, left + length, y + line_px - 5), (33, 102, 172) if rank == 0 else (150, 150, 150))
        draw.text((left + length + 6, y + line_px // 2), f"{entry['probability']:.1%}", (34, 34, 34), font, anchor="lm")
    return canvas
