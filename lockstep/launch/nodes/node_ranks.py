"""Numbers the nodes of a round, and tells them where rank 0 will serve the store of the processes."""

from __future__ import annotations

import socket
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from lockstep.cluster.address import ReservedPort, address_towards, split_endpoint
from lockstep.cluster.signed import AgentStore, Seal, SignedStore
from lockstep.config.process_range import RendezvousConfig


def assign_node_ranks(
    info: RendezvousInfo, seal: Seal, nodes: RendezvousConfig, serves: bool, port: ReservedPort
) -> RendezvousInfo:
    """A round of torch's rendezvous with ranks of our own; torch numbers nodes by their addresses as text.

    Args:
        info: As torch gives it.
        seal: That of the round.
        nodes: Node ranks that users gave are kept; else the node that serves the rendezvous gets rank 0, and with it
            the run folder.
        serves: Whether this node does.
        port: Kept on rank 0 for the store of the processes.

    Raises:
        DistStoreError: A node was lost, or another program writes to the store.
    """
    store = SignedStore(PrefixStore("lockstep/places", info.store), seal.within("places"))
    rank = nodes.rank
    if rank is None:
        store.put(str(info.rank), serves)
        serving = [other for other in range(info.world_size) if store.wait_for(str(other)) is True]
        # None of them serves where there are more nodes than were asked for.
        first = serving[0] if serving else 0
        rank = 0 if info.rank == first else info.rank + (info.rank < first)
    if rank == 0:
        local_addr = address_towards(*split_endpoint(nodes.endpoint)) or socket.getfqdn()
        store.put("rank 0", [local_addr, port.renew("")])
    place = RendezvousStoreInfo(*store.wait_for("rank 0"))
    agent_store: Any = AgentStore(PrefixStore("lockstep/agents", info.store), seal.within("agents"))
    return RendezvousInfo(agent_store, rank, info.world_size, place)
