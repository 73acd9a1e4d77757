"""Images of training samples and of an evaluation, for the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from samebits.data.samples import Batch, Samples
from samebits.metrics.classification import Accuracy
from samebits.recipes.mnist.data import Scale
from samebits.report.pictures import draw_confusion, draw_sheet


def draw_evaluation(metric: Accuracy, samples: Samples, folder: Path, *, scale: Scale) -> None:
    """Draw the confusion matrix and the validation images with the largest loss.

    Args:
        metric: The merged metric of the evaluation.
        samples: The validation images.
        folder: Folder for the PNG files.
        scale: Size and normalization.
    """
    state = metric.state()
    counts, rows = state["confusion"], state["worst"]
    draw_confusion(counts, [str(digit) for digit in range(len(counts))], folder / "confusion.png")
    indices = np.array([index for _, index, _, _ in rows], dtype=np.int64)
    tiles = _tiles(samples.batch(indices, np.zeros(len(indices), dtype=np.uint64)).inputs, scale)
    captions = [
        f"prediction {choice}, ground truth {label}" if label != choice else f"{label}, loss {loss:.2f}"
        for loss, _, label, choice in rows
    ]
    draw_sheet("Validation images with the largest loss", tiles, captions, folder / "worst.png")


def draw_samples(batches: Sequence[Batch], path: Path, *, scale: Scale) -> None:
    """Draw training samples as the model sees them, each with its label.

    Args:
        batches: Batches as the dataset returned them.
        path: The PNG file to write.
        scale: Size and normalization.
    """
    tiles = [tile for batch in batches for tile in _tiles(batch.inputs, scale)]
    captions = [str(label) for batch in batches for label in batch.targets.tolist()]
    draw_sheet("Training samples after augmentation, with their labels", tiles, captions, path)


def _tiles(inputs: Tensor, scale: Scale) -> list[npt.NDArray[np.uint8]]:
    """Undo the normalization: (N, 1, H, W) float32 -> N arrays (H, W) of bytes."""
    return list(np.clip((inputs[:, 0].numpy() * scale.std + scale.mean) * 255, 0, 255).round().astype(np.uint8))
