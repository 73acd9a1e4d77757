"""What the processes of a world tell each other, besides gradients. All of it is free for a process that is alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from lockstep.cluster.rollcall import ranks_text
from lockstep.cluster.world import World
from lockstep.errors import LaunchError, LockstepError

T = TypeVar("T")
TELLING = "telling each other facts"


def gather(world: World, value: T) -> list[T] | None:
    """Every rank's value, by rank, on rank 0; None elsewhere. The value must be picklable."""
    if world.size == 1:
        return [value]
    values: list[T] | None = [value] * world.size if world.is_main else None
    with world.pulse.waiting(TELLING):
        dist.gather_object(value, values, dst=0)
    return values


def gather_all(world: World, value: T) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if world.size == 1:
        return [value]
    values: list[T] = [value] * world.size
    with world.pulse.waiting(TELLING):
        dist.all_gather_object(values, value)
    return values


def broadcast(world: World, value: T) -> T:
    """Rank 0's value, on every rank; what the others give is ignored."""
    if world.size == 1:
        return value
    values: list[object] = [value if world.is_main else None]
    with world.pulse.waiting(TELLING):
        dist.broadcast_object_list(values, src=0)
    return cast(T, values[0])


def from_main(world: World, make: Callable[[], T]) -> T:
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
    value = broadcast(world, value)
    if isinstance(value, LockstepError):
        raise value
    return cast(T, value)


def broadcast_tensors(world: World, tensors: Sequence[Tensor]) -> None:
    """Give every rank the values of rank 0's tensors, in place. Shapes and types must be equal everywhere."""
    if world.size == 1:
        return
    # Collectives take contiguous tensors only; one in channels_last order goes through a copy.
    buffers = [tensor.detach().contiguous() for tensor in tensors]
    with world.pulse.waiting(TELLING):
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
                likely="that process is dead, or still at work on something the others have finished",
            )
    except dist.DistError as error:
        raise LaunchError(f"rank {world.rank} ({world.host}) has lost rank 0, which holds the world's store") from error


def _wait(store: Store, count: int, timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    pause_s = 0.001
    while int(store.get("barrier/count")) < count:
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True


def _turn(store: Store, rank: int) -> int:
    key = f"barrier/{rank}"
    return int(store.get(key)) if store.check([key]) else 0
