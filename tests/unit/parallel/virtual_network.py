"""Messages between virtual ranks of one process, copied in memory and counted."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from samebits.cluster.world import World
from samebits.parallel.exchange.tree_all_reduce import post

_Key = tuple[int, int, int]  # sender, receiver, tag
_Message = tuple[Tensor, int, int, bool]  # a `Message`


class _Transfer:
    """Messages that a rank has posted together."""

    def __init__(self, network: Network, num_open: int) -> None:
        self._network, self.num_open = network, num_open

    def wait(self) -> None:
        """Let the other ranks run until all of them have arrived or have been sent."""
        while self.num_open:
            self._network.wait()


@dataclass
class Traffic:
    """What one rank or the ranks of one machine have sent."""

    messages: int = 0  #: Number of messages.
    num_bytes: int = 0  #: Their bytes.

    def add(self, values: Tensor) -> None:
        """Count a message, (N,)."""
        self.messages += 1
        self.num_bytes += values.nbytes


class Network:
    """The messages between the ranks of one simulated world.

    Args:
        wait: Called by a rank that waits; returns after `deliver` has been called.
    """

    def __init__(self, size: int, wait: Callable[[], object], machines: tuple[int, ...] = ()) -> None:
        self.wait = wait
        self.traffic = [Traffic() for _ in range(size)]  #: What each rank has sent.
        self.machines = machines or (0,) * size  #: For each rank, the number of its machine.
        self.links = [Traffic() for _ in {*self.machines}]  #: What the ranks of each machine have sent to others.
        self.rounds = 0  #: How often all ranks waited: the messages that follow each other, in time.
        self._sent: dict[_Key, deque[tuple[Tensor, _Transfer]]] = defaultdict(deque)
        self._expected: dict[_Key, deque[tuple[Tensor, _Transfer]]] = defaultdict(deque)
        self._ready: list[tuple[tuple[Tensor, _Transfer], tuple[Tensor, _Transfer]]] = []

    def post(self, rank: int, messages: Sequence[_Message]) -> list[_Transfer]:
        """Start messages of a rank."""
        transfer = _Transfer(self, len(messages))
        traffic = self.traffic[rank]
        for values, peer, tag, is_receive in messages:
            entry = values, transfer
            if is_receive:
                key = peer, rank, tag
                if sent := self._sent[key]:
                    self._ready.append((sent.popleft(), entry))
                else:
                    self._expected[key].append(entry)
                continue
            key = rank, peer, tag
            if expected := self._expected[key]:
                self._ready.append((entry, expected.popleft()))
            else:
                self._sent[key].append(entry)
            traffic.add(values)
            if self.machines[rank] != self.machines[peer]:
                self.links[self.machines[rank]].add(values)
        return [transfer]

    def deliver(self) -> None:
        """Copy each message that has been sent and is expected. Called when all ranks wait.

        Raises:
            RuntimeError: There is none, so the ranks wait forever.
        """
        self.rounds += 1
        if not self._ready:
            waiting = sorted(key for queues in (self._sent, self._expected) for key, queue in queues.items() if queue)
            raise RuntimeError(f"the simulated ranks wait for messages that no rank sends: {waiting[:4]}")
        for (values, sender), (memory, receiver) in self._ready:
            memory[: len(values)].copy_(values)  # like gloo: a message may be shorter than the memory for it
            sender.num_open -= 1
            receiver.num_open -= 1
        self._ready = []


@dataclass(frozen=True)
class SimulatedWorld(World):
    """A world whose ranks are all in this process."""

    network: Network | None = None

    @property
    def gloo_group(self) -> None:
        """None: messages are copied in memory."""
        return


@post.register
def _(world: SimulatedWorld, messages: Sequence[_Message], group: object = None) -> list[_Transfer]:
    return world.network.post(world.rank, messages)
