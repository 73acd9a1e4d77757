"""Training and evaluation without an engine: what a recipe hands over is enough."""

from typing import Any

import numpy as np
import torch
from torch import nn

from samebits.data.keyed import keys
from samebits.data.samples import Batch, as_samples
from samebits.engine.parts import Parts
from samebits.metrics.metric import Metric


def read(data: Any, indices: np.ndarray[Any, Any], epoch: int = 0) -> Batch:
    """A batch as the model gets it."""
    samples = as_samples(data)
    batch = samples.batch(indices, keys(0, epoch, indices))
    return batch if samples.finish is None else samples.finish(batch)


def trained(
    parts: Parts, optimizer: torch.optim.Optimizer, num_epochs: int, num_batches: int, model: nn.Module | None = None
) -> list[float]:
    """Train, and return the mean loss of each epoch."""
    data, network, losses = parts.train_data(), model or parts.model, []
    for epoch in range(num_epochs):
        total = 0.0
        for indices in np.array_split(np.random.default_rng(epoch).permutation(len(data)), num_batches):
            batch = read(data, indices, epoch)
            optimizer.zero_grad()
            loss = sum(parts.loss(network(batch.inputs), batch).values(), torch.zeros(()))
            loss.backward()
            optimizer.step()
            total += loss.item() / num_batches
        losses.append(total)
    return losses


def evaluated(parts: Parts, model: nn.Module | None = None) -> Metric:
    """The recipe's metric over all validation samples, in three batches."""
    network = (model or parts.model).eval()
    data, metric = parts.eval_data(), parts.metric()
    with torch.no_grad():
        for indices in np.array_split(np.arange(len(data)), 3):
            batch = read(data, indices)
            metric.add(network(batch.inputs), batch)
    return metric
