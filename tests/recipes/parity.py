"""Weights, inputs and samples of tensors as the recordings of the reference implementations have them."""

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def filled(model: Network) -> Network:
    """A network with weights made from their names, by the recordings' rule."""
    values = {}
    for name, tensor in model.state_dict().items():
        z = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(tuple(tensor.shape))
        if name.endswith("running_var"):
            z = 1 + 0.2 * np.abs(z)
        elif tensor.dim() == 1:
            z = 1 + 0.1 * z if name.endswith("weight") else 0.1 * z
        elif tensor.dim():
            z = z * math.sqrt(1 / math.prod(tensor.shape[1:]))
        is_count = name.endswith("num_batches_tracked")
        values[name] = torch.zeros_like(tensor) if is_count else torch.from_numpy(np.asarray(z, np.float32))
    model.load_state_dict(values)
    return model


def noise(shape: Any, seed: Any) -> Tensor:
    return torch.from_numpy(np.random.default_rng(int(seed)).standard_normal(tuple(shape)).astype(np.float32))


def recorded(
    tensors: Mapping[str, Tensor | None], arrays: Mapping[str, Any], group: str, about: int
) -> Iterator[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """For each tensor of a recording: its name, the sample of ours, and the recorded one."""
    offsets, samples = arrays[f"{group}/offsets"], arrays[f"{group}/samples"]
    for place, name in enumerate(arrays[f"{group}/names"].tolist()):
        tensor = tensors[name]
        values = tensor.detach().contiguous().numpy().reshape(-1)
        yield name, values[:: max(1, values.size // about) | 1], samples[offsets[place] : offsets[place + 1]]
