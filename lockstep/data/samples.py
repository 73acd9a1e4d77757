"""Samples: from an index and a random key to a batch.

A sample's random numbers (crop, flip, shift) come from its own key, which follows from (seed, epoch, index). They do
not depend on which rank or loader worker reads it, nor on what was read before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.data.keyed import IntArray, KeyArray, seeded
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """Samples that go through the model together.

    Attributes:
        inputs: What the model is called with, N samples along the first dimension.
        targets: What the loss and the metric compare with.
        indices: (N,) int64, the samples' places in the data set.
    """

    inputs: Any
    targets: Any
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; returns itself where nothing has to move."""
        if device.type == "cpu":
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def head(self, count: int) -> Batch:
        """The first samples, in the same memory; tensors have the samples along their first dimension."""
        few = self._map(lambda tensor: tensor[:count] if tensor.dim() else tensor)
        return Batch(few.inputs, few.targets, self.indices[:count])

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a GPU reads without waiting."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(_map(self.inputs, change), _map(self.targets, change), self.indices)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple takes each
    return value


def with_channels_last(value: Any) -> Any:
    """Pictures, (N, C, H, W), with the channels last in memory; in a dict, list or tuple too. All else as it is."""
    return _map(value, _channels_last)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    # With one channel or one sample several strides describe the same bytes, and torch chooses its kernels by them.
    _, channels, height, width = tensor.shape
    return tensor.as_strided(tensor.shape, (height * width * channels, 1, width * channels, channels))


def one_sample(value: Any, device: torch.device, *, channels_last: bool) -> Any:
    """What a model takes for one sample: tensors on the device with a first dimension of 1, plain values in lists."""
    if isinstance(value, Tensor):
        batch = value.unsqueeze(0).to(device)
        return with_channels_last(batch) if channels_last else batch
    if isinstance(value, dict):
        return {key: one_sample(item, device, channels_last=channels_last) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(one_sample(item, device, channels_last=channels_last) for item in value)
    return [value]


class Samples(Protocol):
    """A data set that can be read in any order, a batch at a time.

    It may also have `finish(batch) -> Batch`: what is left to do where the batch is used, on the device and in the
    rank's own process, such as to turn bytes into numbers (a quarter of the way's traffic). And `is_costly`: True where
    reading takes so long (files) that processes of its own are worth it. And `files`: paths of the files that it reads,
    whose sizes are compared between ranks and at a resume.
    """

    def __len__(self) -> int:
        """How many samples there are."""

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read samples.

        Args:
            indices: (N,) places in the data set, in the order in which the batch shall have them.
            keys: (N,) one key for each sample: the only source of its random numbers.
        """


class DatasetSamples:
    """Any torch map-style dataset, with torch's, numpy's and Python's generators seeded for each sample.

    So random transforms written for those generators (torchvision's among them) give a sample the same result
    wherever and whenever it is read.

    Args:
        dataset: Has `__len__` and `__getitem__(index)` -> (input, target).
        collate: A list of what `__getitem__` gave -> (inputs, targets); torch's default collation if left out.
    """

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], Any] | None = None) -> None:
        from torch.utils.data import default_collate

        self.dataset = dataset
        self.collate = collate or default_collate

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def files(self) -> list[str] | None:
        """Paths of the dataset's files, where it lists them as torchvision's `ImageFolder` does."""
        listed = getattr(self.dataset, "samples", None)
        if not isinstance(listed, list) or not listed:
            return None
        if not all(isinstance(item, tuple) and item and isinstance(item[0], str) for item in listed):
            return None
        return [item[0] for item in listed]

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read the samples one after another, each under its own key."""
        items = []
        for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
            with seeded(key):
                items.append(self.dataset[index])
        collated = self.collate(items)
        if not isinstance(collated, list | tuple) or len(collated) != 2:
            size = f" of {len(collated)}" if isinstance(collated, list | tuple) else ""
            raise ConfigError(
                f"a sample of {type(self.dataset).__name__} is not a pair (input, target)",
                given=f"collated: a {type(collated).__name__}{size}",
                fix="return (input, target) from __getitem__; several inputs as a dict or tuple in the first place",
            )
        inputs, targets = collated
        return Batch(inputs, targets, torch.from_numpy(indices))
