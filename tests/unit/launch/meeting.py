"""A launcher's part in a rendezvous whose store a test serves."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore

from samebits.cluster.signed import Seal, SignedStore
from samebits.launch.nodes.rendezvous import NodeRendezvous
from samebits.process_range import RendezvousConfig


def a_store(timeout_s: float = 60.0) -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)


class Meeting(NodeRendezvous):
    """A rendezvous that is complete. `serves`: whether this launcher counts as the one that serves the store."""

    def __init__(self, nodes: RendezvousConfig, store: TCPStore, serves: bool = False) -> None:
        self.nodes, self.serves, self.key = nodes, serves, "a secret of the test"
        self._store, self._key_file, self._makes_folder = store.clone(), None, False
        self._check, self._port = (lambda: None), store.port
        self.store = SignedStore(self._store, Seal(self.key, "run"))

    def is_served(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0
