"""Dataset of text lines: images with labels.

Legend: N lines of a batch, H = 32 and W their height and width in pixels, L characters of the longest.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch, Samples
from samebits.recipes.text.alphabet import Alphabet
from samebits.recipes.text.config import DataConfig
from samebits.recipes.text.files import SelectedLines
from samebits.recipes.text.images import jitter_line, normalize, stretch


def targets(labels: Sequence[IntArray]) -> dict[str, Tensor]:
    """Collate N labels of (length,) classes: `classes` (N, L) int64, padded by 0, and `lengths` (N,)."""
    lengths = torch.tensor([len(label) for label in labels], dtype=torch.int64)
    classes = torch.zeros(len(labels), max(1, int(lengths.max())), dtype=torch.int64)
    for row, label in zip(classes, labels, strict=True):
        row[: len(label)] = torch.from_numpy(label)
    return {"classes": classes, "lengths": lengths}


def ground_truths(batch: Batch, alphabet: Alphabet) -> list[str]:
    """Decode the N labels of a batch."""
    pairs = zip(batch.targets["classes"].cpu().numpy(), batch.targets["lengths"].tolist(), strict=True)
    return [alphabet.decode(classes[:length]) for classes, length in pairs]


class LineImages(Samples):
    """Images in files or in LMDB, each stretched to the width of its group."""

    def __init__(self, chosen: SelectedLines, config: DataConfig, *, train: bool) -> None:
        self._chosen, self._config = chosen, config
        self._jitter = config.jitter if train else 0.0
        #: (N,) width group of each line; None if there is one width. The lines of a batch share one group.
        self.groups: IntArray | None = chosen.groups
        labels = chosen.labels.path
        self.files = [labels / "data.mdb" if labels.is_dir() else labels]

    def __len__(self) -> int:
        return len(self._chosen.rows)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Load a batch: inputs (N, 1, 32, W) float32, targets as `targets` returns them."""
        # A sheet of training samples may mix groups: all lines then have the largest width.
        width_px = self._config.widths[0 if self.groups is None else int(self.groups[indices].max())]
        images = []
        for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
            image = self._chosen.image(index)
            if self._jitter:
                rng = np.random.default_rng(key)
                images.append(jitter_line(image, width_px, self._jitter, rng))
            else:
                images.append(stretch(image, width_px))
        labels = [self._chosen.label(index) for index in indices.tolist()]
        inputs = normalize(images, self._config.mean, self._config.std)
        return Batch(inputs, targets(labels), torch.from_numpy(indices))
