"""What the launchers of several machines write for each other into their store: a state each, and numbered views.

    state/K   of node K; counts up with each write, so a node is lost once its count stands still, by the reader's clock
    view/N    the members of view N, written once: of two launchers that try, one succeeds. Processes where they
              recover in the step, else nodes
    ended     the first exit code and text; all launchers read it, and count in "acknowledged"

A thread exchanges them, since a store call can block forever on a dead link. Only the main thread decides.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from samebits.cluster.connecting import first_line
from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.signed import SignedStore
from samebits.cluster.silence import Silence
from samebits.cluster.views.membership import View
from samebits.errors import LaunchError
from samebits.launch.nodes.rendezvous import ANSWER_S
from samebits.scratch import is_running

# How often the thread exchanges states; a change of this node's own is written at once.
EXCHANGE_S = 0.05
# So many failed exchanges in a row mean that the store is lost. One may fail: another program may have removed a key.
MAX_FAILURES = 3
_SHOWN = 8
# A machine whose connections break is lost with its launcher, unless that one writes its state within this time; or,
# where the store or this machine is slow, within so many times the longest time between two looks of this launcher.
SILENT_S = 0.3
SILENT_LOOKS = 4
# So long after the next view has begun, too, at least: often several machines are lost one after the other.
SETTLING_S = 1.0

# After so long without an answer, the launcher looks whether the store is still served.
PROBE_S = 0.5

MemberState = Literal["planned", "started", "ready", "member", "done"]


@dataclass(frozen=True)
class NodeState:
    """What a launcher reports of its node."""

    node: int  #: Its number.
    host: str  #: Its host name.
    pid: int  #: The launcher's process id.
    num_procs: int  #: Processes of this machine in the next view.
    address: str  #: Where rank 0 would serve the store of the next view.
    port: int  #: Reserved for that store.
    rank: int | None = None  #: Its node rank, if the user gave one.
    serves: bool = False  #: Whether it serves the launchers' store.
    beat: int = 0  #: Grows with each write.
    ready: int = 0  #: The view that it enters next or is in: a member of view N with a higher number has ended view N.
    pause: int = -1  #: The view that it asks to end, after a save: a node leaves or has joined.
    done: int = -1  #: The view in which its processes have completed the run.
    has_left: bool = False  #: It takes no part any more.
    #: Where processes recover in the step: the state of each that is planned, runs or is done, by number.
    members: dict[int, MemberState] = field(default_factory=dict)
    is_stopping: bool = False  #: Its launcher stops the run, after a signal.
    is_leaving: bool = False  #: Its launcher has received a signal that may be for this node alone.
    has_ended: bool = (
        False  #: Its launcher writes no more, as its processes are done. It is not lost.
    )
    #: The present view, if a process of this node has lost a connection in it; else -1.
    broken: int = -1


def read_state(content: Mapping[str, Any]) -> NodeState:
    """Return the state with these fields; JSON has texts for the keys of `members`."""
    members = {int(number): state for number, state in content["members"].items()}
    return NodeState(**{**content, "members": members})


@dataclass(frozen=True)
class NodeView:
    """One world of a run: a view whose members are all new."""

    number: int  #: Grows with each view: how often all processes were restarted before.
    #: Node, its first rank and its number of processes; rank 0's node first.
    members: tuple[tuple[int, int, int], ...]
    size: int  #: Number of processes.
    address: str  #: Where rank 0 serves the store.
    port: int  #: Its port.

    @property
    def nodes(self) -> set[int]:
        """The numbers of its nodes."""
        return {node for node, _, _ in self.members}


class EndedOnOtherNode(Exception):
    """Another node has ended the run, with this exit code and text; the text is empty after success."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def next_view(number: int, ready: list[NodeState], members: set[int], most: int) -> NodeView:
    """Give each node that is ready its ranks: at most `most` nodes, and the `members` of the last view first."""
    chosen = sorted(ready, key=lambda state: (state.node not in members, state.node))[:most]
    # Rank 0, and with it the run folder, is on the node that serves the store, unless the user has numbered the nodes.
    chosen.sort(key=lambda state: (state.rank or 0, not state.serves, state.node))
    placed = []
    first = 0
    for state in chosen:
        placed.append((state.node, first, state.num_procs))
        first += state.num_procs
    return NodeView(number, tuple(placed), first, chosen[0].address, chosen[0].port)


def check_node_rank(mine: NodeState, states: Mapping[int, NodeState]) -> None:
    """Check that no launcher which came before this one has the rank that its user gave it.

    Raises:
        LaunchError: Another one has it.
    """
    for other in states.values():
        has_died = other.host == mine.host and not is_running(other.pid)
        if (
            mine.rank is not None
            and other.rank == mine.rank
            and other.node < mine.node
            and not has_died
        ):
            raise LaunchError(
                f"two machines have node rank {mine.rank}",
                where=f"{other.host} pid {other.pid}\n{mine.host} pid {mine.pid}",
                fix="Give each machine its own --node-rank, counted from 0. If the first one is lost, stop all "
                "machines and start them again.",
            )


def missing_node_ranks(states: Mapping[int, NodeState], num_nodes: int) -> str:
    """Return which ranks no machine has, for users; empty if users have given none."""
    ranks = {state.rank for state in states.values()}
    absent = [rank for rank in range(num_nodes) if None not in ranks and rank not in ranks]
    return f"missing node {ranks_text(absent)}" if absent else ""


class SilentNodes:
    """Which nodes are silent: their counts have stood still for `limit_s`, or less after a broken connection."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._silence = Silence(limit_s / 4)
        self._lost: dict[int, int] = {}  # by node: the count at which it was silent
        self._broken_since = self._longest_look_s = 0.0
        self._looked_at = time.monotonic()
        self._broken_at = -math.inf
        self._is_broken = False  # a connection of the present view is, or one was `SETTLING_S` ago

    def look(self, beats: Mapping[int, int], is_broken: bool) -> set[int]:
        """Return the silent nodes, of those with these counts; `is_broken`: one reports a broken connection."""
        now = time.monotonic()
        self._silence.look(beats)
        if is_broken:
            self._broken_at = now
            if not self._is_broken:
                self._broken_since = now
                self._longest_look_s = 0.0
        if self._is_broken:
            self._longest_look_s = max(self._longest_look_s, now - self._looked_at)
        self._looked_at = now
        silent_s = max(SILENT_S, SILENT_LOOKS * self._longest_look_s)
        self._is_broken = now - self._broken_at < max(SETTLING_S, 2 * silent_s)
        has_waited = self._is_broken and now - self._broken_since >= silent_s
        limit_s = min(silent_s, self.limit_s) if has_waited else self.limit_s
        for node, beat in beats.items():
            if self._silence.of(node) >= limit_s:
                self._lost[node] = beat
        return {node for node, beat in beats.items() if self._lost.get(node) == beat}

    def has_timed_out(self, node: int) -> bool:
        """Return whether a node was silent for `limit_s`, whatever its connections are."""
        return self._silence.of(node) >= self.limit_s


V = TypeVar("V", View, NodeView)


class StoreBoard(Generic[V]):
    """One launcher's part in the exchange. A node whose state stays the same for `node_timeout_s` is lost.

    Args:
        store: The run's part of the launchers' store.
        node_timeout_s: See above.
        mine: This node's first state, with any number.
        kind: What the views are.
        is_served: Whether a program listens where the store is served.
    """

    def __init__(
        self,
        store: SignedStore,
        node_timeout_s: float,
        mine: NodeState,
        kind: type[V],
        is_served: Callable[[], bool] = lambda: True,
    ) -> None:
        self._shared = store
        self._is_served = is_served
        self._kind: type[V] = kind
        self._silence = SilentNodes(node_timeout_s)
        # a connection of its own: calls over one connection wait for each other
        self._store = store.clone()
        #: This node's number, the lowest that no other node has taken.
        self.node = next(
            number for number in itertools.count() if self._claims(replace(mine, node=number))
        )
        self._mine = replace(mine, node=self.node)
        self._proposed: V | None = None
        self._seen: dict[int, NodeState] = {}  # last state of each node
        self._states: dict[int, NodeState] = {}
        # guards `_mine`, `_proposed` and `_states`, which two threads use
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._is_over = threading.Event()
        self._looked_at = time.monotonic()
        self._num_failures = 0
        self.views: list[V] = []  #: All views, by number.
        self.ended: EndedOnOtherNode | None = None  #: How another node has ended the run.
        self.broken = ""  #: Why the store is lost; empty while it answers.
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()

    @property
    def view(self) -> V | None:
        """The newest view."""
        return self.views[-1] if self.views else None

    def publish(self, state: NodeState) -> None:
        """Replace this node's state."""
        with self._lock:
            if state != self._mine:
                self._mine = state
                self._is_due.set()

    def states(self) -> dict[int, NodeState]:
        """Return the states of the nodes that take part and are not lost, by number; this node's is always there."""
        with self._lock:
            return {**self._states, self.node: self._mine}

    def begin(self, view: V) -> None:
        """Write the next view. Another launcher may be first; `view` has the one that counts, a moment later."""
        with self._lock:
            self._proposed = view
            self._is_due.set()

    def is_pause(self, number: int) -> bool:
        """Return whether a node has asked to end a view, after a save. It may have left since."""
        # `list`, as the thread adds nodes meanwhile.
        return number in (
            self._mine.pause,
            *(state.pause for state in list(self._seen.values())),
        )

    def has_timed_out(self, node: int) -> bool:
        """Return whether a node has left, or was silent for `node_timeout_s` whatever its connections are."""
        state = self._seen.get(node)
        return state is None or state.has_left or self._silence.has_timed_out(node)

    def lost_store(self) -> str:
        """Return why the store counts as lost; empty while it answers."""
        silent_s = time.monotonic() - self._looked_at
        if self.broken:
            return "the connection is broken"
        # Not left to the thread: torch's client tries for minutes to connect to a store that has ended.
        if silent_s > PROBE_S and not self._is_served():
            return "nothing listens there any more"
        return (
            f"no answer for {silent_s:.0f} s" if silent_s > self._silence.limit_s + ANSWER_S else ""
        )

    def names(self, nodes: Collection[int]) -> str:
        """Return the names of nodes in one line, such as `vm pid 4711`."""
        found = [self._seen[node] for node in sorted(nodes) if node in self._seen]
        names = sorted(f"{state.host} pid {state.pid}" for state in found[:_SHOWN])
        return ", ".join(names) + (" …" if len(nodes) > _SHOWN else "")

    def leave(self, last: NodeState | None = None) -> None:
        """Write the last state, by default one with which this node takes no part any more, and end the thread."""
        self.publish(last or replace(self._mine, has_left=True))
        self._is_over.set()
        self._thread.join(2.0)  # not longer: over a dead link it blocks

    def _claims(self, mine: NodeState) -> bool:
        return read_state(self._store.put_first(f"state/{mine.node}", asdict(mine))) == mine

    def _run(self) -> None:
        beat = 0
        while True:
            is_last = self._is_over.is_set()
            self._is_due.clear()
            beat += 1
            try:
                self._exchange(beat)
                self._num_failures = 0
                self.broken = ""
            except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
                self._num_failures += 1
                if self._num_failures >= MAX_FAILURES:
                    self.broken = first_line(error)[:200]
                # torch's client cannot be used any more after a call that was given up in the middle.
                if not is_last:
                    with suppress(RuntimeError):
                        self._store = self._shared.clone()
            if is_last:
                return
            self._is_due.wait(EXCHANGE_S)

    def _exchange(self, beat: int) -> None:
        with self._lock:
            mine = self._mine
            proposed = self._proposed
        store = self._store
        store.put(f"state/{self.node}", asdict(replace(mine, beat=beat)))
        names = [f"state/{node}" for node in self._seen]
        # After a failure one by one: one call for all waits in vain if another program has removed a key.
        found = dict(
            enumerate(map(store.get, names) if self._num_failures else store.get_all(names))
        )
        # Numbers have no gaps, so one key more shows whether there is another node.
        while (content := store.get(f"state/{len(found)}")) is not None:
            found[len(found)] = content
        for node, content in found.items():
            before = self._seen.get(node)
            # None: another program has written it, and it was refused. An older one is a replay.
            if content is not None and (before is None or content["beat"] > before.beat):
                self._seen[node] = read_state(content)
        self._read_views(proposed)
        present = len(self.views) - 1
        is_broken = any(0 <= present == state.broken for state in self._seen.values())
        silent = self._silence.look(
            {node: state.beat for node, state in self._seen.items()}, is_broken
        )
        live = {
            node: state
            for node, state in self._seen.items()
            if not state.has_left and (state.has_ended or node not in silent)
        }
        if self.ended is None and (record := store.get("ended")) is not None:
            self.ended = EndedOnOtherNode(**record)
        with self._lock:
            self._states = live
        self._looked_at = time.monotonic()

    def _read_views(self, proposed: V | None) -> None:
        while True:
            number = len(self.views)
            name = f"view/{number}"
            if proposed is not None and proposed.number == number:
                content = self._store.put_first(name, asdict(proposed))
            else:
                content = self._store.get(name)
            if content is None:
                return
            members = tuple(tuple(m) if isinstance(m, list) else m for m in content["members"])
            self.views.append(self._kind(**{**content, "members": members}))
