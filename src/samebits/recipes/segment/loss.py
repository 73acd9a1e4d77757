"""The training loss: cross-entropy and the Dice loss, both without ignored pixels.

Legend: N images, C classes, H and W height and width.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from samebits.data.samples import Batch
from samebits.metrics.segmentation import IGNORED


def segment_loss(logits: Tensor, batch: Batch, *, dice: float) -> Mapping[str, Tensor]:
    """Compute the loss of each image, and the mean over the images.

    The Dice loss is that of Milletari, Navab and Ahmadi, "V-Net", 3DV 2016, as a mean over the classes of the image.

    Args:
        logits: (N, C, H, W).
        batch: Its targets have `labels`, (N, H, W) bytes.

    Returns:
        The terms by name, scalars.
    """
    logits, labels = logits.float(), batch.targets["labels"]
    num_images, num_classes = logits.shape[:2]
    is_counted = (labels != IGNORED).flatten(1)
    # As rows of pixels: the cross-entropy of images has no deterministic form on GPUs.
    # The label of ignored pixels is no class: they count as class 0 here, and are dropped below.
    rows, chosen = logits.permute(0, 2, 3, 1).reshape(-1, num_classes), labels.long().masked_fill(labels == IGNORED, 0)
    losses = F.cross_entropy(rows, chosen.flatten(), reduction="none").view(num_images, -1)
    num_pixels = is_counted.sum(dim=1).clamp(min=1)
    terms = {"cross_entropy": ((losses * is_counted).sum(dim=1) / num_pixels).mean()}
    if dice:
        counted = is_counted.unsqueeze(1)
        truth = F.one_hot(chosen.flatten(1), num_classes).transpose(1, 2) * counted
        shares = logits.softmax(dim=1).flatten(2) * counted
        overlap, total = (shares * truth).sum(dim=2), (shares + truth).sum(dim=2)
        is_there = truth.any(dim=2)
        scores = (2 * overlap / total.clamp(min=1e-6) * is_there).sum(dim=1) / is_there.sum(dim=1).clamp(min=1)
        # An image without counted pixels has no class, and no loss.
        terms["dice_loss"] = dice * ((1 - scores) * is_there.any(dim=1)).mean()
    return terms
