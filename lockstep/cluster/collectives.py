"""What the processes of a world tell each other, besides gradients. All of it is free for a process that is alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from lockstep.cluster import codec
from lockstep.cluster.rendezvous import ranks_text
from lockstep.cluster.signed import counted
from lockstep.cluster.world import World
from lockstep.errors import LaunchError, LockstepError

T = TypeVar("T")
EXCHANGING = "exchanging objects"
# The longest message of one rank. Metrics that keep all of a large evaluation set stay below a tenth of it.
MAX_BYTES = 1 << 30


def gather_object(world: World, value: T) -> list[T] | None:
    """Every rank's value, by rank, on rank 0; None elsewhere. `codec.encode` lists what a value may hold."""
    if world.size == 1:
        return [value]
    with world.activity.waiting(EXCHANGING):
        mine, lengths = _with_lengths(world, value)
        padded = [torch.empty_like(mine) for _ in lengths] if world.is_main else None
        dist.gather(mine, padded, dst=0)
        return _decoded(world, padded, lengths) if padded is not None else None


def all_gather_object(world: World, value: T) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if world.size == 1:
        return [value]
    with world.activity.waiting(EXCHANGING):
        mine, lengths = _with_lengths(world, value)
        padded = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(padded, mine)
        return _decoded(world, padded, lengths)


def broadcast_object(world: World, value: T) -> T:
    """Rank 0's value, on every rank; what the others give is ignored."""
    if world.size == 1:
        return value
    with world.activity.waiting(EXCHANGING):
        data = codec.encode(value) if world.is_main else b""
        length = torch.tensor([len(data)], dtype=torch.int64, device=world.device)
        dist.broadcast(length, src=0)
        lengths = _checked_lengths(length.tolist())
        message = _message(data, lengths[0], world)
        dist.broadcast(message, src=0)
        # Rank 0 keeps its own value, as it is.
        return value if world.is_main else cast(T, _decoded(world, [message], lengths)[0])


def _with_lengths(world: World, value: object) -> tuple[Tensor, list[int]]:
    """This rank's message, padded to the longest of all ranks, and how long each rank's is."""
    data = codec.encode(value)
    mine = torch.tensor([len(data)], dtype=torch.int64, device=world.device)
    every = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(every, mine)
    lengths = _checked_lengths(torch.cat(every).tolist())
    return _message(data, max(lengths), world), lengths


def _checked_lengths(lengths: list[int]) -> list[int]:
    for rank, length in enumerate(lengths):
        if not 0 <= length <= MAX_BYTES:
            raise LaunchError(
                f"rank {rank} announced a message of {length:,} bytes",
                allowed=f"at most {MAX_BYTES:,}",
                cause="a metric that keeps too much of each sample, or the network is shared with a hostile process",
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
                reason=error,
                cause="the ranks run different versions of lockstep, or the network damages data",
            ) from None
    return values


def run_on_rank0(world: World, make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, on every rank; elsewhere it is not called.

    Raises:
        LockstepError: What it raised on rank 0, on every rank.
    """
    value: T | LockstepError | None = None
    if world.is_main:
        try:
            value = make()
        except LockstepError as error:
            value = error
    value = broadcast_object(world, value)
    if isinstance(value, LockstepError):
        raise value
    return cast(T, value)


def broadcast_tensors(world: World, tensors: Sequence[Tensor]) -> None:
    """Give every rank the values of rank 0's tensors, in place. Shapes and types must be equal everywhere."""
    if world.size == 1:
        return
    # Collectives take contiguous tensors only; one in channels_last order goes through a copy.
    buffers = [tensor.detach().contiguous() for tensor in tensors]
    with world.activity.waiting(EXCHANGING):
        for work in [dist.broadcast(buffer, src=0, async_op=True) for buffer in buffers]:
            if work is not None:
                work.wait()
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(buffer)


def barrier(world: World, timeout_s: float) -> None:
    """Wait until every rank has come here.

    Goes through the store and not through the process group, so that it can say who did not come.

    Raises:
        LaunchError: Some rank did not come in time; it names all such.
    """
    if world.store is None:
        return
    world.turns.barriers += 1
    turn = world.turns.barriers
    store = world.store
    try:
        store.set(f"barrier/{world.rank}", str(turn))
        # No rank can be a turn ahead, so this count is reached only when all have come.
        store.add("barrier/count", 1)
        if not _wait(store, turn * world.size, timeout_s):
            missing = [rank for rank in range(world.size) if _turn(store, rank) < turn]
            raise LaunchError(
                f"waited {timeout_s:.0f} s for {world.size} processes: {ranks_text(missing)} did not come",
                where=f"barrier {turn} of rank {world.rank} ({world.host})",
                cause="that process is dead, or still at work on something the others have finished",
            )
    except dist.DistError as error:
        raise LaunchError(f"rank {world.rank} ({world.host}) has lost rank 0, which holds the world's store") from error


def _wait(store: Store, count: int, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    pause_s = 0.001
    while _count(store, "barrier/count") < count:
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True


def _turn(store: Store, rank: int) -> int:
    return _count(store, f"barrier/{rank}")


def _count(store: Store, name: str) -> int:
    try:
        return counted(store, name)
    except ValueError:  # another program has written to the store
        return 0
