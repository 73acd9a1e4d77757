"""A model of the time of a step, from measured or given parts.

    busy        reading and computing of the rank with the most micro-batches
    exchange    bucket 0 starts while the last backward pass runs, the others follow on the same link:

                backward ........|
                b0: send  ===========|  add, second round ===|
                b1:          posted  |======|  add, second round ===|
    update      the optimizer

Processes that share a core are measured so, all at once; with more of them than were measured, all of it takes longer.

A round of messages takes two latencies, since a rank announces each receive to the sender. While it lasts, the link
between machines is busy with the bytes of all ranks of a machine, and each process with its own: the slower one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samebits.parallel.exchange.link import Link
from samebits.scaling.step_time.traffic import MessageRound

FORWARD_SHARE = 1 / 3  # of a pass; the backward pass takes twice as many operations
PAYS = 0.5  # a machine pays if it adds at least this share of the throughput of one of those before


@dataclass(frozen=True)
class StepCosts:
    """What one process needs, while the others of its machine need the same.

    Attributes:
        reading_s: Reading a micro-batch in the training process.
        compute_s: Forward and backward pass of a micro-batch.
        update_s: The optimizer's step, and whatever else a step has once.
        add_s_per_byte: Adding a byte of gradients to another.
        local: The link between two processes of this machine: the work of sending and receiving. None: no work.
        message_s: Work of sending a message and receiving one, besides that of their bytes.
    """

    reading_s: float
    compute_s: float
    update_s: float
    add_s_per_byte: float
    local: Link | None
    message_s: float = 0.0


@dataclass(frozen=True)
class MachineGroup:
    """The machines of a run.

    Attributes:
        nodes: Number of machines.
        per_node: Processes of each.
        measured: Processes for which the costs of one were measured at the same time, on one machine. 0: costs that
            further processes do not change, such as those of a GPU for each.
        link: Between two machines, shared by the processes of a machine.
    """

    nodes: int
    per_node: int
    measured: float
    link: Link

    @property
    def slowdown(self) -> float:
        """How much slower a process is than measured, since more of them share the cores; at least 1."""
        return max(1.0, self.per_node / self.measured) if self.measured else 1.0


@dataclass(frozen=True)
class StepTime:
    """Predicted parts of a step, in seconds.

    Attributes:
        reading_s: Reading.
        compute_s: Forward and backward passes.
        update_s: The optimizer.
        work_s: Sending, receiving and adding in the processes, not hidden by the backward pass.
        latency_s: Waiting for messages to arrive, not hidden.
        bandwidth_s: Waiting for the link between machines, not hidden.
    """

    reading_s: float
    compute_s: float
    update_s: float
    work_s: float
    latency_s: float
    bandwidth_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return float(sum(vars(self).values()))

    @property
    def largest(self) -> str:
        """Name of the largest part, such as compute."""
        name, _ = max(vars(self).items(), key=lambda entry: entry[1])
        return name.removesuffix("_s")


def predict(
    costs: StepCosts, machines: MachineGroup, traffic: Sequence[Sequence[MessageRound]], num_micro_batches: int
) -> StepTime:
    """Predict the time of a step.

    Args:
        costs: Of one process.
        machines: Where it runs.
        traffic: Rounds of messages of each bucket, of `count_traffic`.
        num_micro_batches: Of a step, all ranks together.
    """
    slowed = machines.slowdown
    most = -(-num_micro_batches // (machines.nodes * machines.per_node))
    exchange = _Exchange(costs, machines)
    exchange.run(traffic, slowed * costs.compute_s * (1 - FORWARD_SHARE))
    parts = exchange.parts
    # What is hidden is taken from all parts alike.
    shown = exchange.exposed_s / sum(parts.values()) if sum(parts.values()) else 0.0
    return StepTime(
        reading_s=slowed * most * costs.reading_s,
        compute_s=slowed * most * costs.compute_s,
        update_s=slowed * costs.update_s,
        **{name: shown * seconds for name, seconds in parts.items()},
    )


class _Exchange:
    """The exchange of all buckets of a step, on a clock that starts with the last backward pass.

    Attributes:
        parts: Seconds by part of `StepTime`, hidden ones included.
        exposed_s: Seconds from the end of the backward pass to the end of the exchange.
    """

    def __init__(self, costs: StepCosts, machines: MachineGroup) -> None:
        self._costs, self._machines = costs, machines
        self._free_s = 0.0  # from when on the link, or the processes' cores, can send
        self.parts = {"work_s": 0.0, "latency_s": 0.0, "bandwidth_s": 0.0}
        self.exposed_s = 0.0

    def run(self, traffic: Sequence[Sequence[MessageRound]], backward_s: float) -> None:
        """Run all buckets.

        Args:
            traffic: Rounds of each bucket.
            backward_s: Duration of the last backward pass. Buckets are complete at even distances.
        """
        traffic = [rounds for rounds in traffic if rounds]
        arrived = [
            self._send(rounds[0], backward_s * (number + 1) / len(traffic)) for number, rounds in enumerate(traffic)
        ]
        now = last = backward_s
        for rounds, first_s in zip(traffic, arrived, strict=True):
            now = self._add(rounds[0], max(now, first_s))
            for each in rounds[1:]:
                last = self._send(each, now)
                if len(rounds) > 2:  # one partner after another; a direct exchange continues with the next bucket
                    now = self._add(each, last)
        self.exposed_s = max(now, last) - backward_s

    def _send(self, each: MessageRound, ready_s: float) -> float:
        """Return when the messages of a round have arrived."""
        machines, local = self._machines, self._costs.local
        link_s = machines.link.seconds(each.between_bytes * machines.per_node)
        work_s = machines.slowdown * (local.seconds(each.num_bytes) if local else 0.0)
        work_s += machines.slowdown * each.messages * self._costs.message_s
        busy_s = max(link_s, work_s)
        self.parts["bandwidth_s" if link_s > work_s else "work_s"] += busy_s
        start = max(ready_s, self._free_s)
        self._free_s = start + busy_s
        crosses, inside_s = each.between_bytes > 0, 2 * local.latency_s if local else 0.0
        inside_s *= machines.slowdown
        latency_s = max(2 * machines.link.latency_s * crosses, inside_s)
        self.parts["latency_s" if crosses else "work_s"] += latency_s
        return self._free_s + latency_s

    def _add(self, each: MessageRound, start_s: float) -> float:
        seconds = self._machines.slowdown * each.added_bytes * self._costs.add_s_per_byte
        self.parts["work_s"] += seconds
        return start_s + seconds


def last_that_pays(step_s: dict[int, float]) -> int:
    """Return the number of machines from which another one stops paying.

    From each number to the next one, throughput must grow by at least `PAYS` of the growth in machines.

    Args:
        step_s: Step time by number of machines, with one global batch.
    """
    sizes = sorted(step_s)
    best = sizes[0]
    for size in sizes[1:]:
        gained = step_s[best] / step_s[size] - 1
        if gained >= PAYS * (size / best - 1):
            best = size
    return best
