"""Digests of samples as a dataset returned them: dtype, shape and bytes of each value."""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from samebits.bits import as_bytes
from samebits.data.samples import Batch


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
        has_rows = all(isinstance(item, Tensor) and item.dim() and len(item) == count for item in value)
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
