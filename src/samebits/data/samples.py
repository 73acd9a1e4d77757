"""Datasets: from sample indices and random keys to a batch.

Random numbers of a sample (crop, flip, shift) come from its own key, a function of (seed, epoch, index). They do not
depend on the rank or DataLoader worker that reads it, or on the samples read before.
"""

import copy
import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from samebits.bits import as_bytes
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.sources.map_style import check_map_style, files_of, read_items
from samebits.errors import ConfigError


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
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True))

    def head(self, count: int) -> "Batch":
        """Return the first `count` samples, in the same memory."""
        few = self._changed(lambda tensor: tensor[:count] if tensor.dim() else tensor)
        return Batch(few.inputs, few.targets, self.indices[:count])

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(
            map_tensors(self.inputs, change), map_tensors(self.targets, change), self.indices
        )


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with changed tensors of any shape: in dicts, lists, tuples and data classes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        changed: Any = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        # a named tuple
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for part in dataclasses.fields(value):
            item = map_tensors(getattr(value, part.name), change)
            object.__setattr__(changed, part.name, item)  # of a frozen one too
        return changed
    return value


def with_channels_last(value: Any) -> Any:
    """Convert (N, C, H, W) tensors, in dicts, lists and tuples too, to channels_last. Other values are unchanged."""
    return map_tensors(value, _channels_last)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    # With one channel or one sample, several strides describe the same memory, and torch selects kernels by strides.
    _, channels, height, width = tensor.shape
    return tensor.as_strided(
        tensor.shape, (height * width * channels, 1, width * channels, channels)
    )


def to_cpu(value: Any) -> Any:
    """Return tensors on the CPU and without a graph, half precision as float32, in dicts, lists and tuples too."""
    return map_tensors(value, _plain)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def one_sample(value: Any, device: torch.device, *, channels_last: bool) -> Any:
    """Make a batch of one sample: tensors on the device with a first dimension of 1, other values in lists."""
    if isinstance(value, Tensor):
        batch = value.unsqueeze(0).to(device)
        return with_channels_last(batch) if channels_last else batch
    if isinstance(value, dict):
        return {
            key: one_sample(item, device, channels_last=channels_last)
            for key, item in value.items()
        }
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
        for name in ("is_costly", "groups", "finish"):
            setattr(self, name, getattr(source, name, getattr(Samples, name)))

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
        check_map_style(dataset)
        self.dataset = dataset
        self._function = collate

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


# Digests of samples as a dataset returned them: dtype, shape and bytes of each value.


def short_digest(digest: bytes) -> str:
    """Return the first 16 hex digits of a digest."""
    return digest[:8].hex()  # 64 bits are enough: digests find mistakes and are no protection


def digest_of(batch: Batch) -> bytes:
    """Return a digest (32 bytes) of a batch's samples, in order."""
    return hashlib.sha256("".join(sample_digests(batch).values()).encode()).digest()


def sample_digests(batch: Batch) -> dict[int, str]:
    """Return a digest of each sample of a batch, by the sample's index.

    Values that belong to no single sample count for each of them.
    """
    indices = batch.indices.tolist()
    digests = {}
    for row, index in enumerate(indices):
        digest = hashlib.sha256()
        for part in (batch.inputs, batch.targets):
            _feed(digest.update, part, row, len(indices))
        digests[index] = short_digest(digest.digest())
    return digests


def _feed(update: Callable[[bytes], object], value: Any, row: int | None, count: int) -> None:
    """Feed the values of one sample of a batch into a digest; `row` is None inside a value of that sample."""
    if isinstance(value, Tensor):
        if row is not None and value.dim() and len(value) == count:
            value = value[row]
        # dtype and shape come first: equal bytes of another dtype are another sample.
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        update(as_bytes(value).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        if row is not None and value.ndim and len(value) == count:
            value = value[row]
        update(f"{value.dtype} {value.shape}".encode())
        # The bytes of an array of objects are addresses.
        update(value.tobytes() if value.dtype != object else repr(value.tolist()).encode())
    elif isinstance(value, dict):
        for name, item in value.items():
            update(f"{name}:".encode())
            _feed(update, item, row, count)
    elif isinstance(value, list | tuple):
        # Either one item per sample, or several fields with one row per sample each.
        has_rows = all(
            isinstance(item, Tensor) and item.dim() and len(item) == count for item in value
        )
        if row is not None and len(value) == count and not has_rows:
            _feed(update, value[row], None, count)
            return
        for item in value:
            update(b",")
            _feed(update, item, row, count)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            _feed(update, getattr(value, part.name), row, count)
    elif isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        # Machines may have the data under different folders.
        update(os.fsencode(os.path.basename(text) if os.path.isabs(text) else text))
    elif value is None or isinstance(value, bool | int | float | complex | bytes):
        update(repr(value).encode())
    else:
        # Any other object: its repr may contain an address, so only its type counts.
        update(type(value).__name__.encode())


# Errors for samples of a recipe's own dataset that cannot become a batch, with index, what was given and expected.


_EXPECTED = "a pair (input, target); input: a tensor, an array or a number, or a dict, list or tuple of them"
_FUNCTION = "pass collate=, a function of a list of samples that returns (inputs, targets)"
_MAX_NAMES = 6


def describe(value: object) -> str:
    """Describe a sample or a part of it: "a dict with image, label", "an array (28, 28) uint8", "a str"."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} {value.dtype}"
    if isinstance(value, Mapping):
        names = [str(name)[:40] for name in value]
        return (
            f"a dict with {', '.join(names[:_MAX_NAMES])}{' …' if len(names) > _MAX_NAMES else ''}"
        )
    if isinstance(value, list | tuple):
        parts = ", ".join(describe(item) for item in value[:_MAX_NAMES])
        return f"a {type(value).__name__} of {len(value)}" + (
            f": {parts}" if len(value) <= _MAX_NAMES else ""
        )
    if _is_picture(value):
        return f"a PIL image {getattr(value, 'size', '')}"
    return "None" if value is None else f"a {type(value).__name__}"


def collate(
    items: Sequence[Any],
    function: Callable[[Sequence[Any]], Any] | None,
    dataset: Any,
    indices: IntArray,
) -> tuple[Any, Any]:
    """Join samples to inputs and targets, and return both.

    Args:
        function: List of samples -> (inputs, targets). None: torch's `default_collate`.
        indices: (N,) indices of the samples.

    Raises:
        ConfigError: A sample is not a pair of an input that a model can take and a target, or they can't be joined.
    """
    if function is not None:
        joined = function(items)
    else:
        _check_pairs(items, dataset, indices)
        try:
            joined = default_collate(list(items))
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise _cannot_join(items, dataset, indices, error) from error
    if not isinstance(joined, list | tuple) or len(joined) != 2:
        raise ConfigError(
            f"a sample of {type(dataset).__name__} is not a pair (input, target)",
            given=f"after collation: {describe(joined)}",
            fix="Return (input, target) from __getitem__, or from collate=, a function of a list of samples. "
            "Put several inputs into one dict or tuple.",
        )
    return joined[0], joined[1]


def _check_pairs(items: Sequence[Any], dataset: Any, indices: IntArray) -> None:
    for index, item in zip(indices.tolist(), items, strict=True):
        fix = _fix_of(item)
        if fix is not None:
            raise ConfigError(
                f"a sample of {type(dataset).__name__} is not a pair (input, target)",
                given=f"sample {index:,}: {describe(item)}",
                allowed=_EXPECTED,
                fix=fix,
            )


def _fix_of(item: Any) -> str | None:
    """Return what to do about a sample that is no pair of input and target; None if it is one."""
    if isinstance(item, Mapping):
        names = [repr(name) for name in item][:2]
        pair = (
            f"(row[{names[0]}], row[{names[1]}])"
            if len(names) == 2
            else "(row[INPUT], row[TARGET])"
        )
        return f"Return such a pair from __getitem__, for example {pair}; or {_FUNCTION}."
    if not isinstance(item, list | tuple):
        return f"Return (input, target) from __getitem__, or {_FUNCTION}."
    if len(item) != 2:
        return f"Return two values from __getitem__: put several inputs into one dict or tuple; or {_FUNCTION}."
    inputs = item[0]
    if _is_picture(inputs):
        return (
            "Convert the image to a tensor, with torchvision's v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, "
            "scale=True)])."
        )
    if inputs is None or isinstance(inputs, str | bytes):
        return f"Return a tensor as input: read and decode the file in __getitem__, or {_FUNCTION}."
    return None


def _cannot_join(
    items: Sequence[Any], dataset: Any, indices: IntArray, error: Exception
) -> ConfigError:
    """Make the error for samples that torch cannot join: the first one, and the first that is unlike it."""
    texts = [describe(item) for item in items]
    other = next((place for place, text in enumerate(texts) if text != texts[0]), 0)
    given = [f"sample {indices[place]:,}: {texts[place]}" for place in sorted({0, other})]
    return ConfigError(
        f"samples of {type(dataset).__name__} can't be joined to a batch",
        given="\n".join(given),
        allowed="tensors, arrays, numbers, and dicts, lists and tuples of them, of equal shapes in all samples",
        cause=str(error).partition("\n")[0][:300],
        fix=f"Return values of one shape from __getitem__, such as images of one size; or {_FUNCTION}.",
    )


def _is_picture(value: object) -> bool:
    """Return whether a value is a Pillow image, without importing Pillow."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)
