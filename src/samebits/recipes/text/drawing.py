"""Draw training lines, and the validation lines with the most errors, for the run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from samebits.data.keyed import keys
from samebits.data.samples import Batch, Samples
from samebits.metrics.text import TextMetric
from samebits.recipes.text.config import HEIGHT_PX, DataConfig
from samebits.report.fonts import font_for
from samebits.report.pictures import draw_sheet

_ZOOM, _TEXT_PX, _MARGIN_PX, _NUM_COLUMNS = 2, 18, 16, 3
_PAPER, _INK, _WRONG = (255, 255, 255), (34, 34, 34), (178, 24, 43)


def draw_worst(metric: TextMetric, samples: Samples, folder: Path, *, data: DataConfig) -> None:
    """Draw the lines with the most errors as `worst.png`: the image as the network sees it, ground truth, prediction.

    Args:
        metric: The merged metric of the evaluation.
        samples: The validation lines.
        folder: Folder for the PNG file.
        data: Normalization.
    """
    rows = metric.state()["worst"]
    if not rows:
        return
    tiles = [_tile(samples, index, data) for _, index, *_ in rows]
    tile_px = max(tile.width for tile in tiles)
    cell = (tile_px + _MARGIN_PX, _ZOOM * HEIGHT_PX + 2 * (_TEXT_PX + 6) + _MARGIN_PX)
    num_columns = max(1, min(_NUM_COLUMNS, 1200 // cell[0]))
    num_rows = -(-len(tiles) // num_columns)
    sheet = Image.new("RGB", (num_columns * cell[0] + _MARGIN_PX, num_rows * cell[1] + 3 * _MARGIN_PX), _PAPER)
    draw = ImageDraw.Draw(sheet)
    title = "Validation lines with the most errors: ground truth (black), prediction (red)"
    draw.text((_MARGIN_PX, _MARGIN_PX), title, _INK, font_for(title, _TEXT_PX))
    for number, (tile, (_, _, truth, text)) in enumerate(zip(tiles, rows, strict=True)):
        row, column = divmod(number, num_columns)
        x, y = _MARGIN_PX + column * cell[0], 3 * _MARGIN_PX + row * cell[1]
        sheet.paste(tile, (x, y))
        shown = text or "(empty)"
        draw.text((x, y + tile.height + 3), truth, _INK, font_for(truth, _TEXT_PX))
        draw.text((x, y + tile.height + _TEXT_PX + 9), shown, _WRONG, font_for(shown, _TEXT_PX))
    folder.mkdir(parents=True, exist_ok=True)
    sheet.save(folder / "worst.png", optimize=True)


def draw_samples(
    batches: Sequence[Batch], path: Path, *, data: DataConfig, read_truths: Callable[[Batch], list[str]]
) -> None:
    """Draw training lines as the network sees them, each with its text.

    Args:
        batches: Batches as the dataset returned them.
        path: The PNG file to write.
        data: Normalization.
        read_truths: Decodes the labels of a batch.
    """
    tiles = [tile for batch in batches for tile in _grey(batch, data)]
    captions = [text for batch in batches for text in read_truths(batch)]
    title = "Training samples after augmentation, with their labels"
    draw_sheet(title, tiles, captions, path, num_columns=_NUM_COLUMNS, tile_px=(320, 2 * HEIGHT_PX))


def _grey(batch: Batch, data: DataConfig) -> list[npt.NDArray[np.uint8]]:
    """Undo the normalization: inputs (N, 1, 32, W) -> N arrays (32, W) of bytes."""
    return list(np.clip((batch.inputs[:, 0].numpy() * data.std + data.mean) * 255, 0, 255).round().astype(np.uint8))


def _tile(samples: Samples, index: int, data: DataConfig) -> Image.Image:
    indices = np.array([index], dtype=np.int64)
    (pixels,) = _grey(samples.batch(indices, keys(0, 0, indices)), data)
    image = Image.fromarray(pixels)
    return image.resize((image.width * _ZOOM, image.height * _ZOOM), Image.Resampling.BICUBIC).convert("RGB")
