"""Assign node ranks in a round of the rendezvous, and publish where rank 0 will serve the workers' store."""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from samebits.cluster.address import ReservedPort, address_towards, split_endpoint
from samebits.cluster.signed import AgentStore, Seal, SignedStore
from samebits.config.process_range import RendezvousConfig


def assign_node_ranks(
    info: RendezvousInfo, seal: Seal, nodes: RendezvousConfig, serves: bool, port: ReservedPort
) -> RendezvousInfo:
    """Replace the node ranks of a round; torch orders nodes by their addresses as text.

    Args:
        info: The round as returned by torch.
        seal: The seal of the round.
        nodes: Node ranks that the user gave are kept. Otherwise the node that serves the rendezvous becomes node
            rank 0, and with it the owner of the run folder.
        serves: Whether this node serves the rendezvous.
        port: Reserved on node rank 0 for the workers' store.

    Returns:
        The round with the assigned rank, and the address of the workers' store.

    Raises:
        DistStoreError: A node was lost, or another program writes to the store.
    """
    store = SignedStore(PrefixStore("samebits/ranks", info.store), seal.within("ranks"))
    rank = nodes.rank
    if rank is None:
        store.put(str(info.rank), serves)
        # A list of all answers: the rank of each node depends on which of them serves.
        serving = [other for other in range(info.world_size) if store.wait_for(str(other)) is True]
        # No participant serves if more nodes joined than --nodes allows.
        first = serving[0] if serving else 0
        # The serving node becomes 0, and those before it move up by one: a permutation that each node computes alone.
        rank = 0 if info.rank == first else info.rank + (info.rank < first)
    if rank == 0:
        local_addr = address_towards(*split_endpoint(nodes.endpoint)) or socket.getfqdn()
        store.put("rank 0", [local_addr, port.renew("")])
    address = RendezvousStoreInfo(*store.wait_for("rank 0"))
    agent_store: Any = AgentStore(PrefixStore("samebits/agents", info.store), seal.within("agents"))
    return RendezvousInfo(agent_store, rank, info.world_size, address)
