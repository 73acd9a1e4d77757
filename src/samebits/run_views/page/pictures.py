"""Images and the confusion matrix of the last evaluation, inside the page."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Sequence
from pathlib import Path

from samebits.config.plain_file import read_plain
from samebits.run_views.history import Confusion, picture_files
from samebits.run_views.page.markup import Markup, element, table

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
    """Bytes of images that a page may still take.

    Args:
        num_bytes: The limit.
    """

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Return whether so many bytes are left, and take them."""
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True


def pictures(run: Path, budget: Budget, *, has_matrix: bool = False) -> Markup | None:
    """Return the images of a run; None if it has none.

    Args:
        run: The run folder.
        budget: Bytes of images that the page may still take.
        has_matrix: Whether the page has the confusion matrix as a table.
    """
    figures, num_left_out = [], 0
    for path in picture_files(run, has_matrix=has_matrix):
        image = _encoded(path)
        if image is None or not budget.take(len(image[0])):
            num_left_out += 1
            continue
        source, width, height = image
        title = _TITLES.get(path.stem, path.stem.replace("_", " ")[:100])
        attributes = {"src": source, "alt": title, "width": width, "height": height, "loading": "lazy"}
        figures.append(element("figure", None, element("figcaption", None, title), element("img", attributes)))
    if not figures and not num_left_out:
        return None
    note = f"{num_left_out} image files could not be read or are too large." if num_left_out else ""
    return element(
        "div",
        None,
        element("div", {"class": "pictures"}, figures),
        element("p", {"class": "soft"}, note) if note else None,
    )


def _encoded(path: Path) -> tuple[str, int, int] | None:
    """Return a PNG file as a data URI with its width and height; None if it is none."""
    try:
        content = read_plain(path, _MAX_FILE_BYTES)
    except OSError:
        return None
    if content[:8] != _PNG or len(content) < 24:
        return None
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
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            small = image.convert("RGB")
        small.thumbnail((_MAX_SIZE_PX, 4 * _MAX_SIZE_PX))
        out = io.BytesIO()
        small.save(out, "WEBP", quality=85)
    except (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError):
        return None
    return out.getvalue(), small.width, small.height


def matrix(confusion: Confusion) -> Markup:
    """Return a confusion matrix, and for many classes the pairs that were confused most."""
    labels, counts = confusion.labels, confusion.counts
    total, correct = sum(map(sum, counts)), sum(row[index] for index, row in enumerate(counts))
    line = element(
        "p", {"class": "soft"}, f"{correct:,} of {total:,} correct. Rows: ground truth, columns: prediction."
    )
    pairs = _confused_most(labels, counts)
    if len(labels) > _MAX_MATRIX:
        return element("div", None, line, pairs)
    rows = []
    for index, (name, row) in enumerate(zip(labels, counts, strict=True)):
        num = sum(row)
        cells = [
            element("td", {"class": _heat(value, num, is_right=at == index)}, f"{value:,}" if value else "")
            for at, value in enumerate(row)
        ]
        recall = f"{row[index] / num:.1%}" if num else "-"
        rows.append(element("tr", None, element("th", {"scope": "row"}, name), cells, element("td", None, recall)))
    head = [element("th", {"scope": "col"}, element("span", None, name)) for name in ["", *labels, "recall"]]
    is_upright = len(labels) > 6 or max(map(len, labels)) > 10
    whole = element(
        "table",
        {"class": "matrix upright" if is_upright else "matrix"},
        element("thead", None, element("tr", None, head)),
        element("tbody", None, rows),
    )
    box = element("div", {"class": "scroll", "tabindex": "0", "role": "group"}, whole)
    return element("div", None, line, box, pairs if len(labels) > 6 else None)


def _heat(value: int, total: int, *, is_right: bool) -> str | None:
    """Return the CSS classes of a cell: a wrong prediction has full depth at a third of the row."""
    if not value or not total:
        return None
    share = value / total if is_right else min(1.0, 3 * value / total)
    return f"{'right' if is_right else 'wrong'} h{max(1, round(10 * share))}"


def _confused_most(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Markup | None:
    pairs = [
        (value, labels[truth], labels[prediction])
        for truth, row in enumerate(counts)
        for prediction, value in enumerate(row)
        if value and truth != prediction
    ]
    pairs.sort(key=lambda pair: -pair[0])
    if not pairs:
        return None
    rows = [(truth, prediction, f"{value:,}") for value, truth, prediction in pairs[:15]]
    return element(
        "details",
        {"open": ""},
        element("summary", None, "Pairs that were confused most"),
        table(rows, ("ground truth", "prediction", "samples")),
    )
