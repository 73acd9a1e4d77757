"""Datasets: from sample indices and random keys to a batch.

Random numbers of a sample (crop, flip, shift) come from its own key, a function of (seed, epoch, index). They do not
depend on the rank or DataLoader worker that reads it, or on the samples read before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor

from samebits.data.collation import collate
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.sources.map_style import check_map_style, files_of, read_items


@dataclass(frozen=True)
class Batch:
    """Samples that go through the model together.

    Attributes:
        inputs: The argument of the model: a tensor, dict, list or tuple, with N samples along the first dimension.
        targets: Targets for the loss and the metric, of any type.
        indices: (N,) int64, indices of the samples in the dataset.
    """

    inputs: Any
    targets: Any
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        if device.type == "cpu":
            return self
        # From pinned memory the copy runs beside other work. Kernels of the same stream wait for it.
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def head(self, count: int) -> "Batch":
        """Return the first `count` samples, in the same memory."""
        few = self._map(lambda tensor: tensor[:count] if tensor.dim() else tensor)
        return Batch(few.inputs, few.targets, self.indices[:count])

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(_map(self.inputs, change), _map(self.targets, change), self.indices)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple
    return value


def with_channels_last(value: Any) -> Any:
    """Convert (N, C, H, W) tensors, in dicts, lists and tuples too, to channels_last. Other values are unchanged."""
    return _map(value, _channels_last)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    # With one channel or one sample, several strides describe the same memory, and torch selects kernels by strides.
    _, channels, height, width = tensor.shape
    return tensor.as_strided(tensor.shape, (height * width * channels, 1, width * channels, channels))


def to_cpu(value: Any) -> Any:
    """Return tensors on the CPU and without a graph, half precision as float32, in dicts, lists and tuples too."""
    return _map(value, _plain)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def one_sample(value: Any, device: torch.device, *, channels_last: bool) -> Any:
    """Make a batch of one sample: tensors on the device with a first dimension of 1, other values in lists."""
    if isinstance(value, Tensor):
        batch = value.unsqueeze(0).to(device)
        return with_channels_last(batch) if channels_last else batch
    if isinstance(value, dict):
        return {key: one_sample(item, device, channels_last=channels_last) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(one_sample(item, device, channels_last=channels_last) for item in value)
    return [value]


class SampleSource(Protocol):
    """The required part of a dataset. Every object with these two methods can be trained on; see `Samples`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """See `Samples.batch`."""


class Samples:
    """Base class of datasets that are read in any order, a batch at a time.

    The contract:

    - `__len__` and `batch` are required. `batch` is a pure function of its arguments: it may run in any process, in any
      order, and more than once.
    - The attributes below are optional: a subclass sets those that it needs, as attributes, properties or methods.
    - Deriving from this class is optional too. An object with the two required methods, and any of the optional parts
      under these names, works in the same way (`as_samples`).

    Attributes:
        is_costly: Whether reading takes so long (files) that DataLoader workers are worth their memory. The default
            number of workers depends on it.
        groups: (N,) int64 group of each sample, from 0: only samples of one group share a micro-batch. None: any do.
        files: Paths of the files that are read. Their names and sizes are compared between ranks and at a resume.
        finish: A method (batch) -> batch, called in the process of the rank with the batch on its device. Such as the
            conversion of bytes to floats, after they have been sent between processes at a quarter of the size.
    """

    is_costly: bool = False
    groups: IntArray | None = None
    files: Sequence[str | PathLike[str]] | None = None
    finish: Callable[[Batch], Batch] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError(f"{type(self).__name__} has no __len__")

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read samples.

        Args:
            indices: (N,) indices of the samples, in the order of the batch.
            keys: (N,) random key of each sample: the only source of its random numbers.

        Returns:
            The batch, with these indices.
        """
        raise NotImplementedError(f"{type(self).__name__} has no batch")


class _Adapter(Samples):
    """A dataset that does not derive from `Samples`, with its optional parts where it has them."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self.is_costly = getattr(source, "is_costly", Samples.is_costly)
        self.groups = getattr(source, "groups", Samples.groups)
        self.finish = getattr(source, "finish", Samples.finish)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def files(self) -> Sequence[str | PathLike[str]] | None:  # type: ignore[override]  # read when needed: it may be long
        return getattr(self._source, "files", None)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        return self._source.batch(indices, keys)


def as_samples(source: SampleSource) -> Samples:
    """Return a dataset as `Samples`: itself if it derives from the class, otherwise an adapter of its parts."""
    return source if isinstance(source, Samples) else _Adapter(source)


def groups_of(samples: SampleSource) -> IntArray | None:
    """Return the group of each sample of a dataset, (N,) int64 from 0; None if it has no groups."""
    return as_samples(samples).groups


class DatasetSamples(Samples):
    """Adapter of a torch map-style dataset. The generators of torch, numpy and Python are seeded for each sample.

    Random transforms that use these generators, such as torchvision's, therefore have the same result in every process
    and at every time.

    Args:
        dataset: Has `__len__` and `__getitem__(index)` -> (input, target).
        collate: List of samples -> (inputs, targets). Default: torch's `default_collate`.

    Raises:
        ConfigError: The dataset is a stream.
    """

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], Any] | None = None) -> None:
        from torch.utils.data import default_collate

        check_map_style(dataset)
        self.dataset = dataset
        self.collate, self._function = collate or default_collate, collate

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def files(self) -> list[str | PathLike[str]] | None:  # type: ignore[override]  # a property, since the list may be long
        """Paths of the dataset's files, if it lists them in `files`, or in `samples` as torchvision's `ImageFolder`."""
        return files_of(self.dataset)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read samples, each with its own seed; see `Samples.batch`."""
        items = read_items(self.dataset, indices, keys)
        inputs, targets = collate(items, self._function, self.dataset, indices)
        return Batch(inputs, targets, torch.from_numpy(indices))
