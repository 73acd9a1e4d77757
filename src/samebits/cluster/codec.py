"""Encode the objects that ranks exchange, as JSON followed by the raw bytes of tensors and arrays.

    8 bytes: length of the JSON | JSON | bytes of the first tensor | bytes of the second | ...

Unlike pickle, a message from the network cannot run code: decoding builds only plain values, tensors, arrays and the
errors of this package. Floats keep all bits, because JSON writes the shortest decimal that reads back equal.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebits import errors
from samebits.bits import as_bytes

# Key of a JSON object that names the type of the value.
_TYPE = "$"
_HEADER_BYTES = 8
_PLAIN = {NoneType, bool, int, float, str}
# Kinds of numpy types without references to Python objects.
_ARRAY_KINDS = "biufcSUmM"


class MessageError(ValueError):
    """Bytes that `encode` has not written."""


def encode(value: Any) -> bytes:
    """Encode None, numbers, strings, bytes, paths, tensors, arrays, errors, and lists, tuples, sets and dicts of them.

    Raises:
        TypeError: The value contains another type.
    """
    blobs = bytearray()
    try:
        text = json.dumps(_packed(value, blobs), separators=(",", ":")).encode()
    except (
        ValueError,
        RecursionError,
    ) as error:  # a value that contains itself, or a number of thousands of digits
        raise TypeError(f"a value cannot be sent to other processes: {error}") from None
    return b"".join([len(text).to_bytes(_HEADER_BYTES, "little"), text, blobs])


def decode(data: bytes, device: torch.device | None = None) -> Any:
    """Decode a message of `encode`; tensors and arrays have their shapes. Those of a device go to `device`, if given.

    Raises:
        MessageError: The bytes are damaged, or come from another program.
    """
    try:
        length = int.from_bytes(data[:_HEADER_BYTES], "little")
        if len(data) < _HEADER_BYTES + length:
            raise MessageError("a message is truncated")
        blobs = memoryview(data)[_HEADER_BYTES + length :]
        text = data[_HEADER_BYTES : _HEADER_BYTES + length]
        return json.loads(text, object_hook=lambda found: _unpacked(found, blobs, device))
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise MessageError(f"a message cannot be decoded: {error}"[:200]) from None


def _packed(value: Any, blobs: bytearray) -> Any:
    kind = type(value)
    # By the type itself: an IntEnum or a subclass of str would come back as another type; see below.
    if kind in _PLAIN:
        return value
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        if array.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"an array of {array.dtype} cannot be sent to other processes")
        content = [array.dtype.str, list(array.shape), isinstance(value, np.generic)]
        return _tagged("array", [*content, _add(np.ascontiguousarray(array).tobytes(), blobs)])
    if isinstance(value, Tensor):
        content = [str(value.dtype).removeprefix("torch."), list(value.shape), not value.is_cpu]
        return _tagged("tensor", [*content, _add(as_bytes(value).numpy().tobytes(), blobs)])
    if isinstance(value, torch.dtype):
        return _tagged("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.Size):
        return _tagged("size", list(value))
    if isinstance(value, list):
        return _packed_items(value, blobs)
    if isinstance(value, dict):
        if all(type(name) is str for name in value) and _TYPE not in value:
            return {name: _packed(item, blobs) for name, item in value.items()}
        return _tagged(
            "dict", [[_packed(name, blobs), _packed(item, blobs)] for name, item in value.items()]
        )
    if isinstance(value, tuple):
        return _tagged("tuple", _packed_items([*value], blobs))
    if isinstance(value, frozenset | set):
        name = "frozenset" if isinstance(value, frozenset) else "set"
        return _tagged(name, _packed_items([*value], blobs))
    if isinstance(value, bytes):
        return _tagged("bytes", _add(value, blobs))
    if isinstance(value, Path):
        return _tagged("path", str(value))
    if isinstance(value, errors.SamebitsError):
        return _tagged("error", errors.to_json(value))
    if isinstance(
        value, bool | int | float | str
    ):  # of a type of its own, as an IntEnum: its plain value
        return next(plain(value) for plain in (int, float, str) if isinstance(value, plain))
    raise TypeError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent to other processes"
    )


def _packed_items(items: list[Any], blobs: bytearray) -> list[Any]:
    # Most lists are long and contain only numbers: they are kept as they are, without a call for each item.
    return items if set(map(type, items)) <= _PLAIN else [_packed(item, blobs) for item in items]


def _tagged(name: str, content: Any) -> dict[str, Any]:
    return {_TYPE: name, "of": content}


def _add(blob: bytes, blobs: bytearray) -> list[int]:
    start = len(blobs)
    blobs += blob
    return [start, len(blob)]


def _unpacked(found: dict[str, Any], blobs: memoryview, device: torch.device | None) -> Any:
    if _TYPE not in found:
        return found
    name = found[_TYPE]
    content = found["of"]
    if name == "tensor":
        dtype, shape, is_on_device, span = content
        kind = _dtype(dtype)
        data = _blob(span, blobs)
        # A copy, since torch and numpy take a buffer of bytes as read-only. torch refuses an empty buffer.
        flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
        tensor = flat.reshape(shape)
        return tensor.to(device) if is_on_device and device is not None else tensor
    if name == "array":
        dtype, shape, is_scalar, span = content
        wanted = np.dtype(dtype)
        if wanted.kind not in _ARRAY_KINDS:
            raise MessageError(f"a message has an array of {wanted}")
        array = np.frombuffer(bytearray(_blob(span, blobs)), dtype=wanted).reshape(shape)
        return array[()] if is_scalar else array
    if name == "bytes":
        return _blob(content, blobs)
    return _BUILDERS[name](content)


def _dtype(name: Any) -> torch.dtype:
    # The name is from the network: any attribute of torch may be named, and only a dtype is returned.
    kind = getattr(torch, name) if isinstance(name, str) else None
    if not isinstance(kind, torch.dtype):
        raise MessageError("a message has a tensor of an unknown type")
    return kind


def _blob(span: Any, blobs: memoryview) -> bytes:
    start, length = span
    # `type(...) is int`, since True is an int for isinstance.
    if not (type(start) is type(length) is int and 0 <= start <= start + length <= len(blobs)):
        raise MessageError("a message points past its end")
    return bytes(blobs[start : start + length])


_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "path": Path,
    "size": torch.Size,
    "dtype": _dtype,
    "error": errors.from_json,
}
