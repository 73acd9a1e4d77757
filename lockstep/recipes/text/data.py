"""Lines to train and evaluate on: images with labels, or synthetic as they are asked for.

Legend: N lines of a batch, H = 32 and W their height and width in pixels, L characters of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.keyed import IntArray, KeyArray
from lockstep.data.samples import Batch
from lockstep.recipes.text.alphabet import Alphabet
from lockstep.recipes.text.config import DataConfig
from lockstep.recipes.text.files import SelectedLines
from lockstep.recipes.text.images import normalise, stretch
from lockstep.recipes.text.lines import LineRenderer, jitter_line

TRAINING, VALIDATION = 1, 2  # kinds of synthetic lines


def targets(labels: Sequence[IntArray]) -> dict[str, Tensor]:
    """N texts' classes -> `classes` (N, L) int64, 0 after a text's end, and `lengths` (N,)."""
    lengths = torch.tensor([len(label) for label in labels], dtype=torch.int64)
    classes = torch.zeros(len(labels), max(1, int(lengths.max())), dtype=torch.int64)
    for row, label in zip(classes, labels, strict=True):
        row[: len(label)] = torch.from_numpy(label)
    return {"classes": classes, "lengths": lengths}


def ground_truths(batch: Batch, alphabet: Alphabet) -> list[str]:
    """The true texts of a batch."""
    pairs = zip(batch.targets["classes"].cpu().numpy(), batch.targets["lengths"].tolist(), strict=True)
    return [alphabet.decode(classes[:length]) for classes, length in pairs]


class LineImages:
    """Images in files or in LMDB, each stretch to the width of its group.

    Args:
        chosen: Which of the labels.
        config: How images are brought to the network.
        train: Whether they are jitter_line.

    Attributes:
        groups: (N,) place of each line's width among the widths, where there are several; lines of a batch are of one
            group.
    """

    def __init__(self, chosen: SelectedLines, config: DataConfig, *, train: bool) -> None:
        self._chosen, self._config = chosen, config
        self._jitter = config.jitter if train else 0.0
        self.groups: IntArray | None = chosen.groups
        labels = chosen.labels.path
        self.files = [labels / "data.mdb" if labels.is_dir() else labels]

    def __len__(self) -> int:
        return len(self._chosen.places)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read: inputs (N, 1, 32, W) float32, targets as `targets` gives them."""
        width_px = self._width(indices)
        pictures = []
        for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
            picture = self._chosen.picture(index)
            if self._jitter:
                rng = np.random.default_rng(key)
                pictures.append(jitter_line(picture, width_px, self._jitter, rng))
            else:
                pictures.append(stretch(picture, width_px))
        labels = [self._chosen.label(index) for index in indices.tolist()]
        inputs = normalise(pictures, self._config.mean, self._config.std)
        return Batch(inputs, targets(labels), torch.from_numpy(indices))

    def _width(self, indices: IntArray) -> int:
        if self.groups is None:
            return self._config.widths[0]
        # A person's own sheet of lines may mix groups; then all are as wide as the widest.
        return self._config.widths[int(self.groups[indices].max())]


class SyntheticLines:
    """Synthetic lines. In training an index gives another line in each epoch.

    Args:
        makers: Each makes an equal part of the lines, one after another.
        num_lines: Of all together.
        alphabet: Of the network.
        config: How images are brought to the network.
        purpose: TRAINING or VALIDATION.
    """

    groups = None

    def __init__(
        self, makers: Sequence[LineRenderer], num_lines: int, alphabet: Alphabet, config: DataConfig, purpose: int
    ) -> None:
        self._makers, self._num_lines = makers, num_lines
        self._alphabet, self._config, self._purpose = alphabet, config, purpose

    def __len__(self) -> int:
        return self._num_lines

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Draw: inputs (N, 1, 32, W) float32, targets as `targets` gives them and each line's `maker`."""
        places = indices * len(self._makers) // self._num_lines
        made = [
            self._makers[place].line(key, self._purpose)
            for place, key in zip(places.tolist(), keys.tolist(), strict=True)
        ]
        inputs = normalise([picture for picture, _ in made], self._config.mean, self._config.std)
        rest: dict[str, Any] = targets([self._alphabet.encode(text) for _, text in made])
        return Batch(inputs, {**rest, "maker": torch.from_numpy(places)}, torch.from_numpy(indices))


def font_group(batch: Batch) -> list[str]:
    """Which fonts each synthetic line is in."""
    return [("seen_fonts", "unseen_fonts")[maker] for maker in batch.targets["maker"].tolist()]
