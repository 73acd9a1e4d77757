"""What the launchers of several machines write for each other into their store: a state each, and numbered views.

    state/K   of node K; counts up with each write, so a node is lost once its count stands still, by the reader's clock
    view/N    the members of view N, written once: of two launchers that try, one succeeds
    ended     the first exit code and text; all launchers read it, and count in "acknowledged"

A thread exchanges them, since a store call can block forever on a dead link. Only the main thread decides.
"""

import itertools
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from samebits.cluster.signed import SignedStore

# How often the thread exchanges states; a change of this node's own is written at once.
EXCHANGE_S = 0.1
# So many failed exchanges in a row mean that the store is lost. One may fail: another program may have removed a key.
MAX_FAILURES = 3
_SHOWN = 8


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


class StoreBoard:
    """One launcher's part in the exchange. A node whose state stays the same for `node_timeout_s` is lost."""

    def __init__(self, store: SignedStore, node_timeout_s: float, mine: NodeState) -> None:
        self._shared = store
        self._node_timeout_s = node_timeout_s
        # a connection of its own: calls over one connection wait for each other
        self._store = store.clone()
        #: This node's number, the lowest that no other node has taken.
        self.node = next(
            number for number in itertools.count() if self._claims(replace(mine, node=number))
        )
        self._mine = replace(mine, node=self.node)
        self._proposed: NodeView | None = None
        # last state of each node, and when it was first read
        self._seen: dict[int, tuple[NodeState, float]] = {}
        self._states: dict[int, NodeState] = {}
        # guards `_mine`, `_proposed` and `_states`, which two threads use
        self._lock = threading.Lock()
        self._is_due = threading.Event()
        self._is_over = threading.Event()
        self._looked_at = time.monotonic()
        self._num_failures = 0
        self.view: NodeView | None = None  #: The newest view.
        self.ended: EndedOnOtherNode | None = None  #: How another node has ended the run.
        self.broken = ""  #: Why the store is lost; empty while it answers.
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()

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

    def begin(self, view: NodeView) -> None:
        """Write the next view. Another launcher may be first; `view` has the one that counts, a moment later."""
        with self._lock:
            self._proposed = view
            self._is_due.set()

    def is_pause(self, number: int) -> bool:
        """Return whether a node has asked to end a view, after a save. It may have left since."""
        # `list`, as the thread adds nodes meanwhile.
        return number in (
            self._mine.pause,
            *(state.pause for state, _ in list(self._seen.values())),
        )

    def silent_s(self) -> float:
        """Return for how long the store has not answered, seconds."""
        return time.monotonic() - self._looked_at

    def names(self, nodes: Collection[int]) -> str:
        """Return the names of nodes in one line, such as `vm pid 4711`."""
        found = [self._seen[node][0] for node in sorted(nodes) if node in self._seen]
        names = sorted(f"{state.host} pid {state.pid}" for state in found[:_SHOWN])
        return ", ".join(names) + (" …" if len(nodes) > _SHOWN else "")

    def leave(self) -> None:
        """Write the last state, with which this node takes no part any more, and end the thread."""
        self.publish(replace(self._mine, has_left=True))
        self._is_over.set()
        self._thread.join(2.0)  # not longer: over a dead link it blocks

    def _claims(self, mine: NodeState) -> bool:
        return bool(self._store.put_first(f"state/{mine.node}", asdict(mine)) == asdict(mine))

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
                    self.broken = (
                        str(error).strip().partition("\n")[0][:200] or type(error).__name__
                    )
                # torch's client cannot be used any more after a call that was given up in the middle.
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
        now = time.monotonic()
        store.put(f"state/{self.node}", asdict(replace(mine, beat=beat)))
        names = [f"state/{node}" for node in self._seen]
        # After a failure one by one: one call for all waits in vain if another program has removed a key.
        found = dict(
            enumerate(map(store.get, names) if self._num_failures else store.get_all(names))
        )
        # Numbers have no gaps, so one key more shows whether there is another node.
        while (content := store.get(f"state/{len(found)}")) is not None:
            found[len(found)] = content
        # After a pause of this launcher or of the link, how long the others were silent is not known.
        pause_s = max(0.0, now - self._looked_at - self._node_timeout_s / 4)
        for node, content in found.items():
            before, since = self._seen.get(node, (None, now))
            # None: another program has written it, and it was refused. An older one is a replay.
            if content is not None and (before is None or content["beat"] > before.beat):
                self._seen[node] = NodeState(**content), now
            elif before is not None:
                self._seen[node] = before, since + pause_s
        live = {
            node: state
            for node, (state, since) in self._seen.items()
            if not state.has_left and now - since < self._node_timeout_s
        }
        self._read_views(proposed)
        if self.ended is None and (record := store.get("ended")) is not None:
            self.ended = EndedOnOtherNode(**record)
        with self._lock:
            self._states = live
        self._looked_at = now

    def _read_views(self, proposed: NodeView | None) -> None:
        while True:
            number = self.view.number + 1 if self.view is not None else 0
            name = f"view/{number}"
            if proposed is not None and proposed.number == number:
                content = self._store.put_first(name, asdict(proposed))
            else:
                content = self._store.get(name)
            if content is None:
                return
            self.view = NodeView(**{**content, "members": tuple(map(tuple, content["members"]))})
