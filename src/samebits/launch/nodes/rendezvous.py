"""Rendezvous of several machines' launchers: which of them form the world now, agreed through torch's c10d rendezvous.

One launcher serves a small store at the endpoint; every launcher joins there, and joins again whenever a node is lost
or a new one waits. A "node" is torch's word for one launcher with its workers.

    open the store ─ admission (same run?) ─ agree on a key ─ claim a node rank     once, in __init__
          ┌───────────────────────────────────────────────────────────┘
          v
    next_rendezvous: a round ─ assign ranks ─ workers run ─┬─ "pause": a node leaves or joins: save, next round
          ^                                                ├─ a node is silent for node_timeout_s: next round
          └────────────────────────────────────────────────┘
    end: "ended" holds the first exit code and text; all launchers read it, and count in "acknowledged"

Every store call can block forever on a dead link, so each runs in a thread with a deadline (`StoreCalls`). torch's
handler is not thread-safe: `_lock` serializes its calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)

from samebits.cluster.address import ReservedPort, address_towards, split_endpoint
from samebits.cluster.signed import SignedStore
from samebits.cluster.store import open_for_nodes
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError
from samebits.launch.nodes import admission, auth, clocks, rank_claims, waiting
from samebits.launch.nodes.node_ranks import assign_node_ranks
from samebits.launch.nodes.state import StateInStore
from samebits.launch.nodes.store_calls import ANSWER_S, StoreCalls

# Why all nodes restart their workers although none has failed: a node leaves or has joined.
Pause = Literal["leaves", "comes"]
# How long the node that serves the store waits for the others to read how the run ended.
LINGER_S = 8.0
# Heartbeats per node_timeout_s; a node is lost after this many missing ones.
HEARTBEATS = 4


class EndedOnOtherNode(Exception):
    """Another node has ended the run, with this exit code and text; the text is empty after success."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def ended_elsewhere(record: Any) -> EndedOnOtherNode:
    """Parse the end of a run that another node has written into the store; it may be damaged."""
    is_valid = isinstance(record, dict) and type(record.get("code")) is int and isinstance(record.get("text"), str)
    if not is_valid or not 0 <= record["code"] <= 255:
        return EndedOnOtherNode(4, "another node has ended the run")
    return EndedOnOtherNode(record["code"], record["text"])


class NodeRendezvous(RendezvousHandler):
    """torch's c10d rendezvous with errors for users, and with a deadline for every store call.

    Args:
        nodes: Number of nodes, endpoint and timeouts.
        check: Called often during a wait; raises to end it.
        report: Called with a text every few seconds while nodes are missing.

    Raises:
        LaunchError: The store cannot be served or reached, or this launcher may not join.
    """

    def __init__(self, nodes: RendezvousConfig, check: Callable[[], None], report: Callable[[str], None]) -> None:
        self.nodes, self._calls = nodes, StoreCalls(nodes, check, report)
        self.members: frozenset[Any] = frozenset()
        self.lost: frozenset[Any] = frozenset()  # members that have left this round, or sent no heartbeat in time
        self._store, self.serves = self._calls.wait(
            lambda: open_for_nodes(nodes, report), nodes.join_timeout_s + ANSWER_S
        )
        self._key_file: auth.KeyFile | None = None
        self._makes_folder = self.serves and nodes.folder is not None and not nodes.folder.exists()
        try:
            is_first = self._calls.wait(lambda: admission.admit(self._store, nodes, self.serves), admission.LIMIT_S)
            # A node of the same round answers within moments, or is lost.
            self._store.set_timeout(timedelta(seconds=max(10.0, nodes.node_timeout_s)))
            run = PrefixStore(f"samebits/{nodes.run_id}", self._store)
            self.key = self._agree_on_key(run, is_first)
            self.store = SignedStore(run, auth.nodes_seal(self.key, nodes))
            if (rank := nodes.rank) is not None:
                self._calls.wait(lambda: rank_claims.claim(self.store, rank, nodes.size.most), ANSWER_S)
        except BaseException as error:
            note = waiting.as_note(error)
            self._calls.query(lambda: admission.report_refusal(self._store, note))
            self._clean_up()
            raise
        self._round_store: SignedStore | None = None
        self._port = ReservedPort()
        self._inner = DynamicRendezvousHandler.from_backend(
            nodes.run_id,
            self._store,
            StateInStore(self.store),
            nodes.size.least,
            nodes.size.most,
            local_addr=address_towards(*split_endpoint(nodes.endpoint)),
            timeout=RendezvousTimeout(timedelta(seconds=nodes.join_timeout_s), timedelta(seconds=nodes.last_call_s)),
            keep_alive_interval=nodes.node_timeout_s / HEARTBEATS,  # type: ignore[arg-type]  # it makes a timedelta
            keep_alive_max_attempt=HEARTBEATS,
        )
        self._calls.query(lambda: waiting.publish_host(self.store, nodes.endpoint))
        self._lock = threading.Lock()  # torch's handler is not thread-safe
        self._num_waiting, self._is_watched = 0, False

    def _agree_on_key(self, run: Store, is_first: bool) -> str:
        def agree() -> str:
            if not is_first:
                return auth.find_key(run, self.nodes)
            key, self._key_file = auth.exchange_key(run, self.nodes)
            return key

        return self._calls.wait(agree, auth.GREETING_S + ANSWER_S)

    @property
    def round(self) -> int:
        """Return how many worlds this run has had before the present one."""
        return int(self._inner._state_holder.state.round)  # the handler has no public round or members

    def get_backend(self) -> str:
        """Return the backend's name, for torch's records."""
        return "c10d"

    def get_run_id(self) -> str:
        """Return the run's id, for torch's records."""
        return self.nodes.run_id

    @property
    def use_agent_store(self) -> bool:
        """Return False: the worlds of a run do not share one store."""
        # Rank 0 serves a new workers' store in each round, which contains no address of a lost process.
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, once enough nodes have joined.

        Raises:
            EndedOnOtherNode: Another node has ended the run.
            LaunchError: Too few nodes have joined, or the store is lost.
        """

        def join() -> RendezvousInfo:
            with self._lock:
                return self._assign_ranks(self._inner.next_rendezvous())

        try:
            info = self._calls.wait(join, self.nodes.join_timeout_s + 2 * ANSWER_S, self._state)
        except RendezvousClosedError:
            raise self._ended() from None
        except RendezvousTimeoutError:
            raise LaunchError(
                f"gave up waiting for {self.nodes.size.least} nodes at {self.nodes.endpoint}",
                given=self._missing(),
                where=f"after {self.nodes.join_timeout_s:.0f} s (cluster.join_timeout_s)",
                cause=self._calls.query(lambda: waiting.read_refusal(self._store)),
                fix="Start the same command on the missing machines.",
            ) from None
        except dist.DistStoreError:
            raise  # no answer: a node was lost after it had joined
        except (RendezvousError, dist.DistError):
            raise self._calls.lost_store("the connection is broken") from None
        with self._lock:
            self.members, self.lost = frozenset(self._inner._state_holder.state.participants), frozenset()
            self._num_waiting = 0
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._count_waiting, name="rendezvous-watch", daemon=True).start()
        return info

    def _assign_ranks(self, info: RendezvousInfo) -> RendezvousInfo:
        """Verify the size of a round, and assign its node ranks."""
        clocks.check_size(info.world_size, self.nodes)
        seal = self.store.seal.within(f"round {self.round}")
        self._round_store = SignedStore(PrefixStore("samebits", info.store), seal)
        return assign_node_ranks(info, seal, self.nodes, self.serves, self._port)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join the next round."""
        # Counted in a thread: the launcher must supervise its workers even while the store does not answer.
        return self._num_waiting

    def is_closed(self) -> bool:
        """Return False: `next_rendezvous` raises once the run has ended."""
        return False

    def set_closed(self) -> None:
        """Let no further node join."""
        self._calls.query(self._inner.set_closed)

    def shutdown(self) -> bool:
        """Do nothing: `end` shuts down, with a reason."""
        return True

    def announce(self, pause: Pause) -> None:
        """Announce to the other nodes why all workers are about to save and stop."""
        if (store := self._round_store) is not None:
            self._calls.query(lambda: store.put("pause", pause))

    def is_pause(self) -> bool:
        """Return whether the workers of this round were stopped only to be restarted."""
        store = self._round_store
        return store is not None and self._calls.query(lambda: store.get("pause")) in get_args(Pause)

    def is_over(self) -> bool:
        """Return whether a node has ended the run."""
        return self._calls.query(lambda: self.store.get("ended")) is not None

    def leave(self) -> None:
        """Leave at once, so that the others continue without waiting for this node's heartbeat timeout."""

        def leave() -> None:
            if self.nodes.rank is not None:
                rank_claims.release(self.store, self.nodes.rank)
            # A join in progress may hold the lock; it ends with this process.
            if self._lock.acquire(timeout=1.0):
                self._inner._stop_heartbeats()  # the next one would register this node again
                self._inner._op_executor.run(_RendezvousExitOp(), time.monotonic() + ANSWER_S)

        self._calls.query(leave)

    def end(self, code: int, text: str) -> None:
        """End the run on all nodes; the first node to call this sets the result.

        Args:
            code: Exit code of all commands.
            text: Error text for all commands; empty after success.
        """

        def close() -> None:
            # Written before the shutdown: others raise RendezvousClosedError at once, and then read the reason.
            self.store.put_first("ended", {"code": code, "text": text})
            self.store.store.add("acknowledged", 1)
            with self._lock:
                self._inner.shutdown()

        def all_acknowledged() -> None:
            while self.store.count("acknowledged") < len(self.members):
                time.sleep(0.05)

        self._calls.query(close)
        if self.serves:
            self._calls.query(all_acknowledged, LINGER_S)
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove the key file, and the run folder if `admission.publish` created it and it is still empty."""
        if self._key_file is not None:
            self._key_file.remove()
        if self._makes_folder and self.nodes.folder is not None:
            with suppress(OSError):
                self.nodes.folder.rmdir()

    def _ended(self) -> EndedOnOtherNode:
        def read() -> Any:
            self.store.store.add("acknowledged", 1)
            return self.store.get("ended")

        return ended_elsewhere(self._calls.query(read))

    def _count_waiting(self) -> None:
        while True:
            time.sleep(1.0)
            with suppress(RendezvousError, dist.DistError), self._lock:
                self._num_waiting = self._inner.num_nodes_waiting()
                self.lost = self.members - self._inner._state_holder.state.participants.keys()

    def names(self, nodes: Collection[Any]) -> str:
        """Return the names of nodes in one line; empty if the store does not answer."""
        return self._calls.query(lambda: waiting.node_names(self.store, nodes)) or ""

    def _state(self, waited_s: float) -> str:
        state = self._inner._state_holder.state
        what = waiting.describe_wait(self.nodes, state, self.members, self.names([*state.participants]), waited_s)
        refused = self._calls.query(lambda: waiting.read_refusal(self._store))
        return "\n  ".join(filter(None, [what, self._missing(), refused]))

    def _missing(self) -> str:  # node ranks, if the user has assigned them
        return self._calls.query(lambda: rank_claims.missing(self.store, self.nodes)) or ""
