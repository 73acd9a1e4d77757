"""Segmentation metrics from counts of pixels, so that every distribution of the images over ranks has the same result.

Legend: C classes, H and W height and width of an image.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.data.samples import Batch
from samebits.metrics.classification import MAX_NAMED_CLASSES, single_answer
from samebits.metrics.worst import Worst

IGNORED = 255  # the label of pixels that are not counted
_SKETCH_PX = 160
_VALUES_AT_ONCE = 1 << 24  # of logits at the size of the mask: 64 MB


def label_map(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the class with the largest logit, of (C, h, w) interpolated bilinearly, of each pixel: (H, W) bytes."""
    logits = logits.detach().to("cpu", torch.float32)
    # A few classes at a time: a large mask with many classes would take gigabytes. Of equal logits the first one is
    # taken, as by argmax.
    step = max(1, _VALUES_AT_ONCE // (size[0] * size[1]))
    best = torch.empty(0)
    labels = torch.empty(0)
    for first in range(0, len(logits), step):
        part = logits[first : first + step]
        if part.shape[1:] != size:
            part = F.interpolate(part.unsqueeze(0), size, mode="bilinear", align_corners=False)[0]
        values, classes = part.max(dim=0)
        classes = (classes + first).to(torch.uint8)
        if first:
            is_better = values > best
            best = torch.where(is_better, values, best)
            labels = torch.where(is_better, classes, labels)
        else:
            best = values
            labels = classes
    return labels


class SegmentationMetric:
    """Mean IoU and Dice over classes, pixel accuracy, confusion matrix of pixels, and the images with the lowest IoU.

    Predictions are interpolated to the size of each mask. All pixels of the dataset are counted together, as by
    torchmetrics' `JaccardIndex`. A class that is in no mask and no prediction has no IoU and is left out of the mean.

    Args:
        classes: Names of the C classes; their IoU is reported if they are at most 50.
    """

    def __init__(self, classes: Sequence[str], num_worst: int = 8) -> None:
        self._classes = classes
        self._counts = torch.zeros(len(classes), len(classes), dtype=torch.int64)
        self.num_samples = 0  #: Number of samples added, merged ones included.
        self._worst = Worst(num_worst, sign=-1)

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add (N, C, h, w) logits. The batch's targets have `masks`: N tensors (H, W) of bytes."""
        for logits, mask, index in zip(
            outputs, batch.targets["masks"], batch.indices.tolist(), strict=True
        ):
            mask = mask.to("cpu")
            predicted = label_map(logits, (mask.shape[0], mask.shape[1]))
            is_counted = mask != IGNORED
            num_classes = len(self._classes)
            # The (C, C) pairs of label and prediction of the counted pixels.
            cells = mask[is_counted].to(torch.int64) * num_classes + predicted[is_counted]
            counts = torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)
            self._counts += counts
            self.num_samples += 1
            ious = _ious(counts)
            score = sum(ious) / len(ious) if ious else 1.0
            step = -(-max(mask.shape) // _SKETCH_PX)
            self._worst.add([(score, index, predicted[::step, ::step].tolist())])

    def state(self) -> dict[str, Any]:
        """Return `confusion[label][prediction]` in pixels, and the worst images as `[IoU, index, reduced labels]`."""
        return {
            "confusion": self._counts.tolist(),
            "num_samples": self.num_samples,
            "worst": self._worst.rows,
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        self._counts += torch.tensor(state["confusion"], dtype=torch.int64)
        self.num_samples += state["num_samples"]
        self._worst.add(state["worst"])

    def result(self) -> dict[str, float]:
        """Return `mIoU`, `Dice`, `pixel_accuracy`, and `IoU/NAME` for each class that occurs; each from 0 to 1.

        Raises:
            ValueError: No pixel was counted.
        """
        total = int(self._counts.sum())
        correct = self._counts.diagonal()
        if total == 0:
            raise ValueError("no pixels were counted, so there is no IoU")
        ious = _ious(self._counts)
        sizes = self._counts.sum(dim=0) + self._counts.sum(dim=1)
        dices = [
            2 * hits / size
            for hits, size in zip(correct.tolist(), sizes.tolist(), strict=True)
            if size
        ]
        values = {
            "mIoU": sum(ious) / len(ious),
            "Dice": sum(dices) / len(dices),
            "pixel_accuracy": int(correct.sum()) / total,
        }
        if len(self._classes) <= MAX_NAMED_CLASSES:
            occurring = _unions(self._counts).nonzero()[:, 0].tolist()
            values |= {
                f"IoU/{self._classes[label]}": iou
                for label, iou in zip(occurring, ious, strict=True)
            }
        return values

    def warnings(self) -> list[str]:
        """Return a sentence if one class takes all pixels."""
        labels = self._counts.sum(dim=1)
        answers = self._counts.sum(dim=0)
        one = single_answer(labels, answers)
        total = int(labels.sum())
        if one is None:
            return []
        share = int(answers[one]) / total
        own = int(labels[one]) / total
        return [
            f"{share:.2%} of the pixels are predicted as {self._classes[one]}, as {own:.2%} of them are"
        ]


def _unions(counts: Tensor) -> Tensor:
    return counts.sum(dim=0) + counts.sum(dim=1) - counts.diagonal()


def _ious(counts: Tensor) -> list[float]:
    """Return the IoU of each class that occurs in (C, C) counts, in order."""
    pairs = zip(counts.diagonal().tolist(), _unions(counts).tolist(), strict=True)
    return [correct / union for correct, union in pairs if union]
