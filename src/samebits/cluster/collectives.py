"""Collectives over Python objects, which travel as JSON followed by the raw bytes of tensors, and a barrier that
names missing ranks.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from samebits import errors
from samebits.bits import as_bytes
from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.signed import counted
from samebits.cluster.views.torch_traps import wait_for_peers
from samebits.cluster.world import World
from samebits.errors import LaunchError, SamebitsError

# Encode the objects that ranks exchange, as JSON followed by the raw bytes of tensors and arrays.
#
#     8 bytes: length of the JSON | JSON | bytes of the first tensor | bytes of the second | ...
#
# Unlike pickle, a message from the network cannot run code: decoding builds only plain values, tensors, arrays and the
# errors of this package. Floats keep all bits, because JSON writes the shortest decimal that reads back equal.


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


# Collectives over Python objects, and a barrier that names missing ranks. They cost nothing in a world of one rank.


T = TypeVar("T")
EXCHANGING = "exchanging objects"
# Longest message of one rank. Metrics that keep all of a large validation set stay below a tenth of it.
MAX_BYTES = 1 << 30


def gather_object(world: World, value: T) -> list[T] | None:
    """Gather every rank's value, of a type that `codec.encode` lists, on rank 0, by rank; None elsewhere."""
    if world.size == 1:
        return [value]
    with world.activity.waiting(EXCHANGING):
        mine, lengths = _with_lengths(world, value)
        padded = [torch.empty_like(mine) for _ in lengths] if world.is_main else None
        # gather needs tensors of equal size on all ranks, hence the padding.
        wait_for_peers(world.membership, lambda: dist.gather(mine, padded, dst=0))
        return _decoded(world, padded, lengths) if padded is not None else None


def all_gather_object(world: World, value: T) -> list[T]:
    """Gather every rank's value on every rank, by rank."""
    if world.size == 1:
        return [value]
    with world.activity.waiting(EXCHANGING):
        mine, lengths = _with_lengths(world, value)
        padded = [torch.empty_like(mine) for _ in lengths]
        wait_for_peers(world.membership, lambda: dist.all_gather(padded, mine))
        return _decoded(world, padded, lengths)


def broadcast_object(world: World, value: T, src: int = 0) -> T:
    """Return one rank's value on every rank. `value`: this rank's value; ignored on the other ranks."""
    if world.size == 1:
        return value
    with world.activity.waiting(EXCHANGING):
        data = encode(value) if world.rank == src else b""
        length = torch.tensor([len(data)], dtype=torch.int64, device=world.device)
        # Receivers have to allocate before the message itself is sent.
        wait_for_peers(world.membership, lambda: dist.broadcast(length, src=src))
        lengths = _checked_lengths(length.tolist())
        message = _message(data, lengths[0], world)
        wait_for_peers(world.membership, lambda: dist.broadcast(message, src=src))
        # The sender keeps its own object, without a round trip through the codec.
        return value if world.rank == src else cast(T, _decoded(world, [message], lengths)[0])


def any_rank(world: World, flag: bool) -> bool:
    """Return on every rank whether a flag is set on any rank."""
    if world.size == 1:
        return flag
    number = torch.tensor([int(flag)], dtype=torch.int64, device=world.device)
    with world.activity.waiting(EXCHANGING):
        wait_for_peers(world.membership, lambda: dist.all_reduce(number, op=dist.ReduceOp.MAX))
    return bool(number.item())


def are_equal(world: World, value: object) -> bool:
    """Return on every rank whether all ranks have the same value, also in the order of dicts.

    Compares digests with rank 0's: what a rank receives does not grow with the world, as the values of all ranks do.
    """
    if world.size == 1:
        return True
    digest = hashlib.sha256(encode(value)).digest()
    # frombuffer needs a writable buffer.
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(world.device)
    first = mine.clone()
    with world.activity.waiting(EXCHANGING):
        wait_for_peers(world.membership, lambda: dist.broadcast(first, src=0))
    return not any_rank(world, not torch.equal(first, mine))


def _with_lengths(world: World, value: object) -> tuple[Tensor, list[int]]:
    """Encode this rank's value padded to the longest message, and return the length of every rank's message."""
    data = encode(value)
    mine = torch.tensor([len(data)], dtype=torch.int64, device=world.device)
    every = [torch.empty_like(mine) for _ in range(world.size)]
    wait_for_peers(world.membership, lambda: dist.all_gather(every, mine))
    lengths = _checked_lengths(torch.cat(every).tolist())
    return _message(data, max(lengths), world), lengths


def _checked_lengths(lengths: list[int]) -> list[int]:
    for rank, length in enumerate(lengths):
        if not 0 <= length <= MAX_BYTES:
            raise LaunchError(
                f"rank {rank} announced a message of {length:,} bytes",
                allowed=f"at most {MAX_BYTES:,} bytes",
                cause="a metric keeps too much of each sample, or another program on the network sends data",
                fix="Keep less of each sample in the metric.",
            )
    return lengths


def _message(data: bytes, length: int, world: World) -> Tensor:
    message = torch.zeros(length, dtype=torch.uint8)
    if data:
        message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return message.to(world.device)


def _decoded(world: World, messages: Sequence[Tensor], lengths: Sequence[int]) -> list[Any]:
    values = []
    for rank, (message, length) in enumerate(zip(messages, lengths, strict=True)):
        try:
            values.append(decode(message[:length].cpu().numpy().tobytes(), world.device))
        except MessageError as error:
            raise LaunchError(
                f"rank {world.rank} ({world.host}) cannot read the message of rank {rank}",
                given=error,
                cause="the ranks run different versions of samebits, or the network damages data",
                fix="Install the same version of samebits on all machines.",
            ) from None
    return values


def run_on_rank0(world: World, make: Callable[[], T]) -> T:
    """Call a function on rank 0 only, and return its result on every rank.

    Raises:
        SamebitsError: The function raised it on rank 0; it is raised on every rank.
    """
    value: T | SamebitsError | None = None
    if world.is_main or world.size == 1:
        try:
            value = make()
        # Any other exception is a bug: it ends rank 0 with its traceback, and the other ranks by the lost connection.
        except SamebitsError as error:
            value = error
    value = broadcast_object(world, value)
    if isinstance(value, SamebitsError):
        raise value
    return cast(T, value)


def broadcast_tensors(world: World, tensors: Sequence[Tensor]) -> None:
    """Copy rank 0's tensors, of any shape, into every rank's tensors of the same shapes and types, in place."""
    if world.size == 1:
        return
    # Collectives need contiguous tensors; a channels_last tensor is copied through a contiguous buffer.
    buffers = [tensor.detach().contiguous() for tensor in tensors]
    with world.activity.waiting(EXCHANGING):
        # All are started before the first wait, so that small tensors do not take a round trip each.
        works = [dist.broadcast(buffer, src=0, async_op=True) for buffer in buffers]
        wait_for_peers(
            world.membership, lambda: [work.wait() for work in works if work is not None]
        )
    for tensor, buffer in zip(tensors, buffers, strict=True):
        # `contiguous` returns the tensor itself where it is contiguous: then there is nothing to copy.
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)


def barrier(world: World, timeout_s: float) -> None:
    """Wait, for `timeout_s` seconds at most, until every rank has reached this point.

    Uses the store and not the process group, because only the store can identify the ranks that are missing.

    Raises:
        LaunchError: Some ranks did not reach the barrier in time; names all of them.
    """
    if world.store is None:
        return
    turn = next(world.turns)
    store = world.store
    try:
        store.set(f"barrier/{world.rank}", str(turn))
        # No rank can be a barrier ahead, so the count reaches this value only when all ranks have arrived.
        store.add("barrier/count", 1)
        end = time.monotonic() + timeout_s
        pause_s = 0.001
        while _count(store, "barrier/count") < turn * world.size:
            if time.monotonic() > end:
                missing = [
                    rank for rank in range(world.size) if _count(store, f"barrier/{rank}") < turn
                ]
                raise LaunchError(
                    f"waited {timeout_s:.0f} s for {world.size} processes: {ranks_text(missing)} did not come",
                    where=f"barrier {turn} of rank {world.rank} ({world.host})",
                    cause="that process has ended, or is still busy with work that the others have finished",
                    fix="Read the output of that rank.",
                )
            time.sleep(pause_s)
            # Each look is a call to the one store of the world, so a long wait looks less often.
            pause_s = min(2 * pause_s, 0.05)
    except dist.DistError as error:
        raise LaunchError(
            f"rank {world.rank} ({world.host}) lost rank 0, which serves the store",
            cause="rank 0 has ended; its own output gives the reason",
            fix="Read the output of rank 0.",
        ) from error


def _count(store: Store, name: str) -> int:
    try:
        return counted(store, name)
    except ValueError:  # another program has written to the store
        return 0
