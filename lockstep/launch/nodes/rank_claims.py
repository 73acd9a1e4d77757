"""Machines with the ranks that people gave them: each rank has one machine, and those that have not come are known."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from lockstep.cluster.signed import SignedStore
from lockstep.errors import LaunchError
from lockstep.scratch import is_running


def claim(store: SignedStore, rank: int, num_nodes: int) -> None:
    """Take a rank for this machine's launcher.

    Args:
        store: What all launchers of the run share.
        rank: This machine's.
        num_nodes: How many machines there are to be.

    Raises:
        LaunchError: Another one has the rank, or was told of another number of machines.
    """
    first = store.put_first("num_nodes", num_nodes)
    if first != num_nodes:
        raise LaunchError(
            f"the machines don't agree on how many they are: node rank {rank} was started with --nodes {num_nodes}, "
            f"another with --nodes {first}",
            fix="give all of them the same --nodes",
        )
    mine = [socket.gethostname(), os.getpid()]
    found = store.put_first(_key(rank), mine)
    if found == mine:
        return
    is_claim = isinstance(found, list) and [type(item) for item in found] == [str, int]
    host, pid = found if is_claim else (mine[0], 0)
    if not is_claim or (host == mine[0] and not is_running(pid)):  # it has died, and was started again
        store.put(_key(rank), mine)
        return
    raise LaunchError(
        f"two machines have node rank {rank}",
        where=f"{host} pid {pid}\n{mine[0]} pid {mine[1]}",
        fix=f"give each machine its own --node-rank, 0 to {num_nodes - 1}; where the first one is gone for good, "
        "stop all and go on with --resume auto",
    )


def release(store: SignedStore, rank: int) -> None:
    """Give a rank back."""
    store.store.delete_key(_key(rank))


def absent(store: SignedStore, num_nodes: int) -> Sequence[int]:
    """The ranks that nobody has taken."""
    return [rank for rank in range(num_nodes) if store.get(_key(rank)) is None]


def _key(rank: int) -> str:
    return f"node/{rank}"
