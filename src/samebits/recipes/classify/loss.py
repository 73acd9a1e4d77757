"""The training loss: cross-entropy."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from samebits.data.samples import Batch


def cross_entropy(logits: Tensor, batch: Batch, *, label_smoothing: float) -> Mapping[str, Tensor]:
    """Compute the mean cross-entropy in nats.

    Label smoothing as in Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016,
    section 7: the target is (1 - smoothing) for the label and smoothing / C more for each of the C classes.

    Args:
        logits: (N, C) scores of the classes.
        batch: Its targets are (N,) labels, from 0 to C - 1.
        label_smoothing: Share of the target that is spread over all classes, from 0 to 1.

    Returns:
        The loss by name, a scalar.
    """
    return {"cross_entropy": F.cross_entropy(logits.float(), batch.targets, label_smoothing=label_smoothing)}
