"""Claims of node ranks that users assigned: each rank belongs to one launcher, and the missing ones are known."""

import os
import socket

from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.signed import SignedStore
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError
from samebits.scratch import is_running


def claim(store: SignedStore, rank: int, num_nodes: int) -> None:
    """Claim a node rank for this launcher.

    Raises:
        LaunchError: Another launcher has the rank, or was started with another number of machines.
    """
    first = store.put_first("num_nodes", num_nodes)
    if first != num_nodes:
        raise LaunchError(
            f"the numbers of machines differ: node rank {rank} was started with --nodes {num_nodes}, "
            f"another with --nodes {first}",
            fix="Start all machines with the same --nodes.",
        )
    # Host and process id together: two launchers on one machine are two claims.
    mine = [socket.gethostname(), os.getpid()]
    found = store.put_first(_key(rank), mine)
    if found == mine:
        return
    host, pid = found
    if host == mine[0] and not is_running(pid):  # that launcher has died, and was started again
        store.put(_key(rank), mine)
        return
    raise LaunchError(
        f"two machines have node rank {rank}",
        where=f"{host} pid {pid}\n{mine[0]} pid {mine[1]}",
        fix=f"Give each machine its own --node-rank, 0 to {num_nodes - 1}. If the first one is lost for good, "
        "stop all machines and resume with --resume auto.",
    )


def release(store: SignedStore, rank: int) -> None:
    """Release a node rank."""
    # The key is deleted, since the store has no other way to let `put_first` succeed again.
    store.store.delete_key(_key(rank))


def missing(store: SignedStore, nodes: RendezvousConfig) -> str:
    """Return which node ranks no launcher has claimed, for users; empty if the user has not assigned node ranks."""
    absent = [rank for rank in range(nodes.size.most) if nodes.rank is not None and store.get(_key(rank)) is None]
    return f"missing node {ranks_text(absent)}" if absent else ""


def _key(rank: int) -> str:
    return f"node/{rank}"
