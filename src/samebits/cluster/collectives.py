"""Collectives over Python objects, and a barrier that names missing ranks. They cost nothing in a world of one rank."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from samebits.cluster import codec
from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.signed import counted
from samebits.cluster.views.torch_traps import wait_for_peers
from samebits.cluster.world import World
from samebits.errors import LaunchError, SamebitsError

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
        data = codec.encode(value) if world.rank == src else b""
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
    digest = hashlib.sha256(codec.encode(value)).digest()
    # frombuffer needs a writable buffer.
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(world.device)
    first = mine.clone()
    with world.activity.waiting(EXCHANGING):
        wait_for_peers(world.membership, lambda: dist.broadcast(first, src=0))
    return not any_rank(world, not torch.equal(first, mine))


def _with_lengths(world: World, value: object) -> tuple[Tensor, list[int]]:
    """Encode this rank's value padded to the longest message, and return the length of every rank's message."""
    data = codec.encode(value)
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
            values.append(codec.decode(message[:length].cpu().numpy().tobytes(), world.device))
        except codec.MessageError as error:
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
