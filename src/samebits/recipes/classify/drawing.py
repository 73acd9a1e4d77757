"""Draw an evaluation and a prediction."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from samebits.data.images import read_rgb
from samebits.data.keyed import IntArray
from samebits.data.samples import Batch, Samples
from samebits.errors import printable
from samebits.metrics.classification import Accuracy
from samebits.recipes.results import ByteArray, draw_classes
from samebits.report.fonts import font_for
from samebits.storage.run_folder import write_atomically


def tiles(batch: Batch, classes: Sequence[str]) -> Iterable[tuple[ByteArray, str]]:
    """Return the images of a batch, (S, S, 3) bytes, each with its class."""
    return zip(batch.inputs.numpy(), (classes[label] for label in batch.targets.tolist()), strict=True)


def draw_evaluation(metric: Accuracy, samples: Samples, folder: Path, *, classes: Sequence[str]) -> None:
    """Draw the confusion matrix and the images with the largest loss, and write the counts to confusion.csv.

    With too many classes for a matrix, the file has the samples of each class and how many were correct.
    """
    state = metric.state()
    folder.mkdir(parents=True, exist_ok=True)
    if "confusion" in state:
        matrix = np.array(state["confusion"], np.int64)
        table = np.column_stack([matrix.sum(1), matrix.diagonal(), matrix])
        _write_counts(table, [f"predicted {name}" for name in classes], classes, folder / "confusion.csv")
    else:
        table = np.column_stack([state["samples"], state["correct"]])
        _write_counts(table, [], classes, folder / "confusion.csv")
    draw_classes(metric, samples, folder, classes=classes, tiles=lambda batch: tiles(batch, classes))


def _write_counts(table: IntArray, columns: Sequence[str], classes: Sequence[str], path: Path) -> None:
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["ground truth", "samples", "correct", *map(_cell, columns)])
    rows.writerows([_cell(name), *row] for name, row in zip(classes, table.tolist(), strict=True))
    write_atomically(path, text.getvalue().encode())


def _cell(name: str) -> str:
    """Return a class name that no terminal and no spreadsheet acts on: there, a cell after = + - @ is a formula."""
    name = printable(name)
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t")) else name


def draw_prediction(path: Path, prediction: Mapping[str, Any]) -> Image.Image:
    """Draw an image with the most likely classes of `top_classes` below it, each with a bar for its probability."""
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
