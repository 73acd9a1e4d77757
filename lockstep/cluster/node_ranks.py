"""Machines with the ranks that people gave them: each rank has one machine, and those that have not come are known."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from lockstep.errors import LaunchError
from lockstep.scratch import is_running


def claim(store: Store, rank: int, num_nodes: int) -> None:
    """Take a rank for this machine's launcher.

    Args:
        store: What all launchers of the run share.
        rank: This machine's.
        num_nodes: How many machines there are to be.

    Raises:
        LaunchError: Another one has the rank, or was told of another number of machines.
    """
    first = int(store.compare_set("num_nodes", "", str(num_nodes)))
    if first != num_nodes:
        raise LaunchError(
            f"the machines don't agree on how many they are: node rank {rank} was started with --nodes {num_nodes}, "
            f"another with --nodes {first}",
            do="give all of them the same --nodes",
        )
    mine = (socket.gethostname(), os.getpid())
    host, pid = json.loads(store.compare_set(_key(rank), "", json.dumps(mine)))
    if (host, pid) == mine:
        return
    if host == mine[0] and not is_running(pid):  # it has died, and was started again
        store.set(_key(rank), json.dumps(mine))
        return
    raise LaunchError(
        f"two machines have node rank {rank}",
        where=f"{host} pid {pid}\n{mine[0]} pid {mine[1]}",
        do=f"give each machine its own --node-rank, 0 to {num_nodes - 1}; where the first one is gone for good, "
        "stop all and go on with --resume auto",
    )


def release(store: Store, rank: int) -> None:
    """Give a rank back."""
    store.delete_key(_key(rank))


def absent(store: Store, num_nodes: int) -> Sequence[int]:
    """The ranks that nobody has taken."""
    return [rank for rank in range(num_nodes) if not store.check([_key(rank)])]


def _key(rank: int) -> str:
    return f"node/{rank}"
