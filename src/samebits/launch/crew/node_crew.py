"""What the crews of one of several machines share: the other launchers, and whether there are enough of them."""

import os
import socket
import time
from dataclasses import replace
from typing import Generic, TypeVar

from samebits.cluster.address import address_towards, split_endpoint
from samebits.cluster.views.membership import View
from samebits.launch.crew.crew import Crew, Entry
from samebits.launch.crew.recovery import Recovery
from samebits.launch.nodes.board import NodeState, NodeView, StoreBoard
from samebits.launch.nodes.rendezvous import LIMIT_S, NodeRendezvous
from samebits.launch.supervisor import Supervisor

V = TypeVar("V", View, NodeView)


class NodeCrew(Crew, Generic[V]):
    """The processes of one machine of several.

    Args:
        kind: What the views are.

    Attributes:
        is_leaving: This node leaves the run, and the others continue.
    """

    def __init__(
        self, entry: Entry, supervisor: Supervisor, num_procs: int, min_procs: int, max_restarts: int,
        recovery: Recovery, rendezvous: NodeRendezvous, kind: type[V],
    ) -> None:  # fmt: skip
        super().__init__(entry, supervisor, num_procs, min_procs, max_restarts, recovery)
        self._rendezvous = rendezvous
        self._nodes = rendezvous.nodes
        address = address_towards(*split_endpoint(self._nodes.endpoint)) or socket.getfqdn()
        # Where members change, each view has a port of its own.
        port = 0 if recovery.in_step else self._port.renew("")
        mine = NodeState(
            0, socket.gethostname(), os.getpid(), num_procs, address, port, self._nodes.rank, rendezvous.serves
        )  # fmt: skip
        timeout_s = self._nodes.node_timeout_s
        self._board: StoreBoard[V] = rendezvous.wait(
            lambda: StoreBoard(rendezvous.store, timeout_s, mine, kind, rendezvous.is_served),
            LIMIT_S,
        )
        self._state = replace(mine, node=self._board.node)
        self._began = self._enough_since = time.monotonic()
        self.is_leaving = False

    def _is_enough(self, num_nodes: int) -> bool:
        """Return whether a first view may begin with so many nodes; to be called at each look."""
        now = time.monotonic()
        if num_nodes < self._nodes.size.least:
            self._enough_since = now
            return False
        has_waited = now - self._enough_since > self._nodes.last_call_s
        return num_nodes >= self._nodes.size.most or has_waited

    def _leave_if(self, may_leave: bool) -> None:
        """Leave the others after a failure with no restart left, if they can do without this node."""
        self.is_leaving = may_leave
        if may_leave:
            self._supervisor.report("no restart is left: this node leaves, and the others continue")
