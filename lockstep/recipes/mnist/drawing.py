"""Pictures of an evaluation, for the run folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.data.samples import Samples
from lockstep.metrics.classification import Accuracy
from lockstep.recipes.mnist.data import Scale
from lockstep.report.pictures import draw_confusion, draw_sheet


def draw_pictures(metric: Accuracy, samples: Samples, folder: Path, *, scale: Scale) -> None:
    """Draw the confusion matrix and the pictures with the largest loss.

    Args:
        metric: What was counted over all of them.
        samples: The evaluated pictures.
        folder: Where the PNGs go.
        scale: How bytes became numbers.
    """
    state = metric.state()
    counts, rows = state["confusion"], state["worst"]
    draw_confusion(counts, [str(place) for place in range(len(counts))], folder / "confusion.png")
    indices = np.array([index for _, index, _, _ in rows], dtype=np.int64)
    inputs = samples.batch(indices, np.zeros(len(indices), dtype=np.uint64)).inputs[:, 0].numpy()
    tiles = np.clip((inputs * scale.std + scale.mean) * 255, 0, 255).round().astype(np.uint8)
    captions = [
        f"{label} taken for {choice}" if label != choice else f"{label}, loss {loss:.2f}"
        for loss, _, label, choice in rows
    ]
    draw_sheet("The held-out pictures with the largest loss", list(tiles), captions, folder / "worst.png")
