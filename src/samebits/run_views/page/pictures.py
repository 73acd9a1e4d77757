"""Images and the confusion matrix of the last evaluation, inside the page."""

import base64
import io
import os
from pathlib import Path
from typing import Any

from samebits.config.plain_file import read_plain
from samebits.report.format import metric_value
from samebits.run_views.history import Confusion

_TITLES = {
    "train_samples": "Training samples after augmentation",
    "confusion": "Confusion matrix",
    "worst": "Validation samples with the largest loss",
    "people": "Validation images with predictions",
}
_MAX_FILE_BYTES = 32 * 1024 * 1024
_MAX_PIXELS = 40_000_000
_PLAIN_BYTES = 200 * 1024  # a larger file is encoded again
_MAX_SIZE_PX = 1400
_MAX_PICTURES = 12
_MAX_MATRIX = 30  # classes; for more, the pairs that were confused most


class Budget:
    """Bytes of images that a page may still take."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Return whether so many bytes are left, and take them."""
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True


def pictures(run: Path, budget: Budget, *, has_matrix: bool = False) -> tuple[list[dict[str, Any]], int]:
    """Return the images of a run, and how many are left out.

    Args:
        run, budget: The run folder, and the bytes of images that the page may still take.
    """
    found, num_left_out = [], 0
    drawn = ("curves.png", "confusion.png") if has_matrix else ("curves.png",)  # the page draws them from numbers
    try:
        names = sorted(name for name in os.listdir(run / "pictures") if name.endswith(".png") and name not in drawn)
    except OSError:
        names = []
    for path in [run / "pictures" / name for name in names[:_MAX_PICTURES]]:
        image = _encoded(path)
        if image is None or not budget.take(len(image[0])):
            num_left_out += 1
            continue
        title = _TITLES.get(path.stem, path.stem.replace("_", " ")[:100])
        found.append({"title": title, "source": image[0], "width": image[1], "height": image[2]})
    return found, num_left_out


def _encoded(path: Path) -> tuple[str, int, int] | None:
    """Return a PNG file as a data URI with its width and height; None if it is none."""
    from PIL import Image

    try:
        content, kind = read_plain(path, _MAX_FILE_BYTES), "png"
        # By the PNG decoder only, whatever the content claims to be (ADR 28). The size is that of its header, before a
        # decoder takes memory for so many pixels.
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None
            shown: Image.Image = image
            if len(content) > _PLAIN_BYTES:
                shown, out = image.convert("RGB"), io.BytesIO()
                shown.thumbnail((_MAX_SIZE_PX, 4 * _MAX_SIZE_PX))
                shown.save(out, "WEBP", quality=85)
                content, kind = out.getvalue(), "webp"
    # Pillow raises SyntaxError for a damaged PNG file.
    except (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError):
        return None
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}", shown.width, shown.height


def matrix(confusion: Confusion) -> dict[str, Any]:
    """Return the rows of a confusion matrix, and for many classes the pairs that were confused most."""
    labels, counts = confusion.labels, confusion.counts
    rows = []
    for index, (name, row) in enumerate(zip(labels, counts, strict=True)):
        num = sum(row)
        cells = [(value, _heat(value, num, is_right=at == index)) for at, value in enumerate(row)]
        rows.append({"name": name, "cells": cells, "recall": metric_value("recall", row[index] / num) if num else "-"})
    pairs = [
        (value, labels[truth], labels[prediction])
        for truth, row in enumerate(counts)
        for prediction, value in enumerate(row)
        if value and truth != prediction
    ]
    pairs.sort(key=lambda pair: -pair[0])
    return {
        "heads": ["", *labels, "recall"],
        "total": sum(map(sum, counts)),
        "correct": sum(row[index] for index, row in enumerate(counts)),
        "rows": rows if len(labels) <= _MAX_MATRIX else None,
        "pairs": [(truth, guess, f"{num:,}") for num, truth, guess in pairs[:15]] if len(labels) > 6 else None,
        "is_upright": len(labels) > 6 or max(map(len, labels)) > 10,
    }


def _heat(value: int, total: int, *, is_right: bool) -> str | None:
    """Return the CSS classes of a cell: a wrong prediction has full depth at a third of the row."""
    if not value or not total:
        return None
    share = value / total if is_right else min(1.0, 3 * value / total)
    return f"{'right' if is_right else 'wrong'} h{max(1, round(10 * share))}"
