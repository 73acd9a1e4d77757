"""Draw training lines, and the validation lines with the most errors, for the run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samebits.data.keyed import keys
from samebits.data.samples import Batch, Samples
from samebits.metrics.text import TextMetric
from samebits.recipes.text.config import HEIGHT_PX, DataConfig
from samebits.report.pictures import draw_sheet

_NUM_COLUMNS, _TILE_PX = 3, (320, 2 * HEIGHT_PX)


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
    tiles = []
    for _, index, *_ in rows:
        indices = np.array([index], dtype=np.int64)
        tiles += _gray(samples.batch(indices, keys(0, 0, indices)), data)
    captions = [f"ground truth {truth}\nprediction {text or '(empty)'}" for _, _, truth, text in rows]
    title = "Validation lines with the most errors"
    draw_sheet(title, tiles, captions, folder / "worst.png", num_columns=_NUM_COLUMNS, tile_px=_TILE_PX)


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
    tiles = [tile for batch in batches for tile in _gray(batch, data)]
    captions = [text for batch in batches for text in read_truths(batch)]
    title = "Training samples after augmentation, with their labels"
    draw_sheet(title, tiles, captions, path, num_columns=_NUM_COLUMNS, tile_px=_TILE_PX)


def _gray(batch: Batch, data: DataConfig) -> list[npt.NDArray[np.uint8]]:
    """Undo the normalization: inputs (N, 1, 32, W) -> N arrays (32, W) of bytes."""
    return list(np.clip((batch.inputs[:, 0].numpy() * data.std + data.mean) * 255, 0, 255).round().astype(np.uint8))
