"""Evaluation without an engine: what a recipe hands over is enough."""

import numpy as np
import torch

from samebits.data.keyed import keys
from samebits.engine.parts import Parts
from samebits.metrics.metric import Metric


def evaluated(parts: Parts) -> Metric:
    """The recipe's metric over all validation samples, in three batches."""
    parts.model.eval()
    data, metric = parts.eval_data(), parts.metric()
    with torch.no_grad():
        for indices in np.array_split(np.arange(len(data)), 3):
            batch = data.batch(indices, keys(0, 0, indices))
            metric.add(parts.model(batch.inputs), batch)
    return metric
