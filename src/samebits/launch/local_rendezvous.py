"""Rendezvous of one machine's launcher, which has no peers to wait for."""

from __future__ import annotations

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from samebits.cluster.address import ReservedPort

LOCAL = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """Rendezvous of a single agent: no peers, no host names, and a new port for every start."""

    def __init__(self) -> None:
        self.round = -1
        self._port = ReservedPort()

    def get_backend(self) -> str:
        """Return the backend's name, for torch's records."""
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Start the next round."""
        self.round += 1
        # Rank 0 serves the workers' store, not the agent: workers can then finish and save after the agent was killed.
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOCAL, self._port.renew(LOCAL)))

    def is_closed(self) -> bool:
        """Return False: it ends with the agent."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no peers to notify."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's name, for torch's records."""
        return "samebits"

    def shutdown(self) -> bool:
        """Release the port."""
        self._port.close()
        return True
