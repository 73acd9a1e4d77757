"""The training loss: cross-entropy."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from samebits.data.samples import Batch


def cross_entropy(logits: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    """Compute the mean cross-entropy in nats of (N, 10) logits and (N,) labels."""
    return {"cross_entropy": F.cross_entropy(logits, batch.targets)}
