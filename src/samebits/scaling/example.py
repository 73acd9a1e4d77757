"""An example input for a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from samebits.config.schema import RunConfig
from samebits.data.keyed import keys
from samebits.data.samples import as_samples
from samebits.engine.build import open_data
from samebits.engine.parts import Parts


def example(config: RunConfig, parts: Parts) -> Any:
    """Return the model's input for one sample: of the recipe's `input_shape`, or the first training sample.

    Raises:
        DataError: The recipe has no `input_shape`, and there is no data.
    """
    if parts.input_shape is not None:
        return torch.zeros(1, *parts.input_shape)
    samples = open_data(config, parts, train=True)
    index = np.zeros(1, np.int64)
    batch = samples.batch(index, keys(config.seed, 0, index))
    finish = as_samples(samples).finish
    return (batch if finish is None else finish(batch)).inputs
