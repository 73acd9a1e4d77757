"""Several machines: which of them are in the world now, agreed through torch's c10d rendezvous.

One of them serves a small store at the address that all were given; a launcher on each joins there, and joins again
whenever somebody is lost or comes. "Node" is torch's word for one launcher with its processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
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

from lockstep.cluster.address import ReservedPort, address_towards, split_endpoint
from lockstep.cluster.rendezvous import ranks_text
from lockstep.cluster.signed import SignedStore
from lockstep.cluster.store import open_for_nodes
from lockstep.config.process_range import RendezvousConfig
from lockstep.errors import LaunchError
from lockstep.launch.nodes import admission, auth, clocks, rank_claims
from lockstep.launch.nodes.node_ranks import assign_node_ranks
from lockstep.launch.nodes.state import StateInStore
from lockstep.launch.nodes.store_calls import ANSWER_S, StoreCalls

# Why all nodes start their processes anew though none has failed: a node goes, or one has come.
Pause = Literal["leaves", "comes"]
# How long the node that serves the store waits for the others to read how the run ended.
LINGER_S = 8.0
HEARTBEATS = 4


class EndedOnOtherNode(Exception):
    """Another node has ended the run, and says with which exit code and text; empty where all is well."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def ended_elsewhere(said: Any) -> EndedOnOtherNode:
    """The end of a run as another node has left it in the store, which may be damaged."""
    is_whole = isinstance(said, dict) and type(said.get("code")) is int and isinstance(said.get("text"), str)
    if not is_whole or not 0 <= said["code"] <= 255:
        return EndedOnOtherNode(4, "another node has ended the run")
    return EndedOnOtherNode(said["code"], said["text"])


class NodeRendezvous(RendezvousHandler):
    """torch's rendezvous, with our words, and never deaf: whatever asks the store may wait for ever, so it does that
    in a thread.

    Args:
        nodes: How many, and where.
        check: Called often while it waits; raises to end the wait.
        say: Gets a text every few seconds while somebody is missing.

    Raises:
        LaunchError: The store can't be served or reached.
    """

    def __init__(self, nodes: RendezvousConfig, check: Callable[[], None], report: Callable[[str], None]) -> None:
        self.nodes, self._calls = nodes, StoreCalls(nodes, check, report)
        self.members: frozenset[Any] = frozenset()
        self._store, self.serves = self._calls.wait(
            lambda: open_for_nodes(nodes, report), nodes.join_timeout_s + ANSWER_S
        )
        self._key_file: auth.KeyFile | None = None
        self._makes_folder = self.serves and nodes.folder is not None and not nodes.folder.exists()
        try:
            is_first = self._calls.wait(lambda: admission.admit(self._store, nodes, self.serves), admission.LIMIT_S)
            # Who has joined with us answers within moments, or is lost.
            self._store.set_timeout(timedelta(seconds=max(10.0, nodes.node_timeout_s)))
            run = PrefixStore(f"lockstep/{nodes.run_id}", self._store)
            self.key = self._agree_on_key(run, is_first)
            self._run = SignedStore(run, auth.nodes_seal(self.key, nodes))
            if (rank := nodes.rank) is not None:
                self._calls.wait(lambda: rank_claims.claim(self._run, rank, nodes.size.most), ANSWER_S)
        except BaseException:
            self._clean_up()
            raise
        self._round_store: SignedStore | None = None
        self._port = ReservedPort()
        self._inner = DynamicRendezvousHandler.from_backend(
            nodes.run_id,
            self._store,
            StateInStore(self._run),
            nodes.size.least,
            nodes.size.most,
            local_addr=address_towards(*split_endpoint(nodes.endpoint)),
            timeout=RendezvousTimeout(timedelta(seconds=nodes.join_timeout_s), timedelta(seconds=nodes.last_call_s)),
            keep_alive_interval=nodes.node_timeout_s / HEARTBEATS,  # type: ignore[arg-type]  # it makes a timedelta
            keep_alive_max_attempt=HEARTBEATS,
        )
        self._lock = threading.Lock()  # the rendezvous is not made for two threads
        self._num_waiting = 0
        self._is_watched = False

    def _agree_on_key(self, run: Store, is_first: bool) -> str:
        def agree() -> str:
            if not is_first:
                return auth.find_key(run, self.nodes)
            key, self._key_file = auth.exchange_key(run, self.nodes)
            return key

        return self._calls.wait(agree, auth.GREETING_S + ANSWER_S)

    @property
    def round(self) -> int:
        """How many worlds this run has had before the present one."""
        return int(self._inner._state_holder.state.round)

    def get_backend(self) -> str:
        """Its name, for torch's records."""
        return "c10d"

    def get_run_id(self) -> str:
        """Its name, for torch's records."""
        return self.nodes.run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether all worlds of the run share one store."""
        # Rank 0 serves the processes' own store, a new one in each round: no address of a lost process is left in it.
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next world, once enough nodes have come.

        Raises:
            EndedElsewhere: Another node has ended the run.
            LaunchError: Too few have come, or the store is lost.
        """

        def join() -> RendezvousInfo:
            with self._lock:
                return self._numbered(self._inner.next_rendezvous())

        try:
            info = self._calls.wait(join, self.nodes.join_timeout_s + 2 * ANSWER_S, self._state)
        except RendezvousClosedError:
            raise self._ended() from None
        except RendezvousTimeoutError:
            raise LaunchError(
                f"gave up waiting for {self.nodes.size.least} nodes at {self.nodes.endpoint}",
                missing=self._missing() or None,
                where=f"after {self.nodes.join_timeout_s:.0f} s (cluster.join_timeout_s)",
                fix="start the same command on the machines that are missing",
            ) from None
        except dist.DistStoreError:
            raise  # an answer that did not come: a node was lost after it had joined
        except (RendezvousError, dist.DistError):
            raise self._calls.lost_store("the connection is broken") from None
        self.members = frozenset(self._inner._state_holder.state.participants)
        self._num_waiting = 0
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._count_waiting, name="rendezvous-watch", daemon=True).start()
        return info

    def _numbered(self, info: RendezvousInfo) -> RendezvousInfo:
        """That world with the ranks that people gave; else with rank 0, and with it the run folder, where all meet.

        torch numbers nodes by their addresses as text.
        """
        clocks.check_size(info.world_size, self.nodes)
        seal = self._run.seal.within(f"round {self.round}")
        self._round_store = SignedStore(PrefixStore("lockstep", info.store), seal)
        return assign_node_ranks(info, seal, self.nodes, self.serves, self._port)

    def num_nodes_waiting(self) -> int:
        """How many have come since the world began, and wait for the next one."""
        # Counted in a thread: the launcher looks after its processes also while the store does not answer.
        return self._num_waiting

    def is_closed(self) -> bool:
        """Whoever needs to know asks `next_rendezvous`."""
        return False

    def set_closed(self) -> None:
        """Let nobody join any more."""
        self._calls.query(self._inner.set_closed)

    def shutdown(self) -> bool:
        """Nothing: `end` does it, with a reason."""
        return True

    def announce(self, pause: Pause) -> None:
        """Tell the other nodes why all processes are about to save and stop."""
        if (store := self._round_store) is not None:
            self._calls.query(lambda: store.put("pause", pause))

    def is_pause(self) -> bool:
        """Whether the processes of this round were to stop only to be started anew."""
        store = self._round_store
        return store is not None and self._calls.query(lambda: store.get("pause")) in get_args(Pause)

    def is_over(self) -> bool:
        """Whether a node has ended the run."""
        return self._calls.query(lambda: self._run.get("ended")) is not None

    def leave(self) -> None:
        """Let the others go on without this node at once, not only when it is missed."""

        def leave() -> None:
            if self.nodes.rank is not None:
                rank_claims.release(self._run, self.nodes.rank)
            # Held by a join that goes on; it ends with this process.
            if self._lock.acquire(timeout=1.0):
                self._inner._stop_heartbeats()
                self._inner._op_executor.run(_RendezvousExitOp(), time.monotonic() + ANSWER_S)

        self._calls.query(leave)

    def end(self, code: int, text: str) -> None:
        """End the run on all nodes. The first to say so is heard.

        Args:
            code: What the commands exit with.
            text: What they say; empty where all is well.
        """

        def close() -> None:
            self._run.put_first("ended", {"code": code, "text": text})
            self._run.store.add("acknowledged", 1)
            with self._lock:
                self._inner.shutdown()

        def all_acknowledged() -> None:
            while self._run.count("acknowledged") < len(self.members):
                time.sleep(0.05)

        self._calls.query(close)
        if self.serves:
            self._calls.query(all_acknowledged, LINGER_S)
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove the key file, and the run folder if `admission.publish` made it and no run has begun in it."""
        if self._key_file is not None:
            self._key_file.remove()
        if self._makes_folder and self.nodes.folder is not None:
            with suppress(OSError):
                self.nodes.folder.rmdir()

    def _ended(self) -> EndedOnOtherNode:
        def read() -> Any:
            self._run.store.add("acknowledged", 1)
            return self._run.get("ended")

        said = self._calls.query(read)
        return ended_elsewhere(said)

    def _count_waiting(self) -> None:
        while True:
            time.sleep(1.0)
            with suppress(RendezvousError, dist.DistError), self._lock:
                self._num_waiting = self._inner.num_nodes_waiting()

    def _state(self) -> str:
        come = sorted(node.addr for node in self._inner._state_holder.state.participants)
        have = "has" if len(come) == 1 else "have"
        missing = self._missing()
        return (
            f"waiting for {self.nodes.size.least} nodes at {self.nodes.endpoint}: {len(come)} {have} come"
            + (f" ({', '.join(come[:8])}{' …' if len(come) > 8 else ''})" if come else "")
            + (f", missing {missing}" if missing else "")
        )

    def _missing(self) -> str:
        """Of nodes that people gave ranks, those that have never come."""
        if self.nodes.rank is None:
            return ""
        absent = self._calls.query(lambda: rank_claims.absent(self._run, self.nodes.size.most))
        return f"node {ranks_text(absent)}" if absent else ""
