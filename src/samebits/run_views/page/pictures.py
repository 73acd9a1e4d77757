"""Images and the confusion matrix of the last evaluation, inside the page."""

import base64
import io
import struct
from pathlib import Path
from typing import Any

from samebits.config.plain_file import read_plain
from samebits.report.format import metric_value
from samebits.run_views.history import Confusion, picture_files

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
_MAX_MATRIX = 30  # classes; for more, the pairs that were confused most
_PNG = b"\x89PNG\r\n\x1a\n"


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
    for path in picture_files(run, has_matrix=has_matrix):
        image = _encoded(path)
        if image is None or not budget.take(len(image[0])):
            num_left_out += 1
            continue
        title = _TITLES.get(path.stem, path.stem.replace("_", " ")[:100])
        found.append({"title": title, "source": image[0], "width": image[1], "height": image[2]})
    return found, num_left_out


def _encoded(path: Path) -> tuple[str, int, int] | None:
    """Return a PNG file as a data URI with its width and height; None if it is none."""
    try:
        content = read_plain(path, _MAX_FILE_BYTES)
    except OSError:
        return None
    if content[:8] != _PNG or len(content) < 24:
        return None
    # From the header, before a decoder takes memory for so many pixels.
    width, height = struct.unpack(">II", content[16:24])
    if not (0 < width * height <= _MAX_PIXELS):
        return None
    kind = "png"
    if len(content) > _PLAIN_BYTES:
        smaller = _smaller(content)
        if smaller is None:
            return None
        content, width, height = smaller
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}", width, height


def _smaller(content: bytes) -> tuple[bytes, int, int] | None:
    from PIL import Image

    try:
        # By the PNG decoder only, whatever the content claims to be (ADR 28).
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            small = image.convert("RGB")
        small.thumbnail((_MAX_SIZE_PX, 4 * _MAX_SIZE_PX))
        out = io.BytesIO()
        small.save(out, "WEBP", quality=85)
    # Pillow raises SyntaxError for a damaged PNG file.
    except (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError):
        return None
    return out.getvalue(), small.width, small.height


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
