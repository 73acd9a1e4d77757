"""All-reduce of a part over machines with several ranks each, which sends each value out of a machine once.

Slices of a part are summed inside a machine first, then between machines, each slice by one rank of each machine. Two
machines with ranks 0 1 and 2 3, two slices, seen from rank 0:

    inside    send slice 1 of own nodes to rank 1, receive slice 0 of rank 1's nodes       add: nodes of the machine
    between   exchange slice 0 with rank 2, which has slice 0 of the other machine's nodes  add: slice 0 is complete
    inside    send slice 0 of the sum to rank 1, receive slice 1

There are as many slices as ranks on the largest machine. On a machine with fewer ranks, a rank has several:

    4 + 2 ranks     slice        0  1  2  3
                    machine 0    0  1  2  3     the rank that exchanges the slice with the other machine
                    machine 1    4  4  5  5

The nodes of a machine are those of its ranks after siblings are merged: a single one where its micro-batches are a
complete subtree (`data/division.py`). The brackets are those of `tree.py`, so all ways have the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest

from torch import Tensor

from samebits.parallel.exchange.part import Part, Rounds, cuts
from samebits.parallel.exchange.tags import RESULT
from samebits.parallel.tree import Node, merged


def exchange_in_two_levels(part: Part, *, machines: Sequence[int], between: Callable[[Part], Rounds]) -> Rounds:
    """Sum a part inside machines, one number for each member, and slices of it `between` them."""
    groups, nodes = _layout(tuple(machines), tuple(map(tuple, part.nodes)), part.num_leaves, part.exact)
    num_slices = max(map(len, groups))
    bounds = cuts(part.total.numel(), (1,) * num_slices)
    here = next(group for group in groups if part.place in group)
    me = here.index(part.place)
    # Each rank starts with its right neighbor, so that not all send to the first one.
    peers = [here[(me + distance) % len(here)] for distance in range(1, len(here))]

    def region(values: Tensor, place: int) -> Tensor:
        first, last = _slices(here.index(place), len(here), num_slices)
        return values[bounds[first] : bounds[last]]

    destination = region(part.total, part.place)
    entries = [(node, region(values, part.place)) for node, values in part.held]
    for peer in peers:
        for index, (_, values) in enumerate(part.held):
            part.send(region(values, peer), peer, index)
        entries += part.receive_nodes(part.nodes[peer], peer, destination.numel())
    if peers:
        yield part.round()
    entries = part.add(entries, destination)
    first, last = _slices(me, len(here), num_slices)
    exchanges = []
    for number in range(first, last):
        start, stop = bounds[number] - bounds[first], bounds[number + 1] - bounds[first]
        # The inverse of `_slices`: the rank of each machine that has the slice.
        members = [part.members[group[((number + 1) * len(group) - 1) // num_slices]] for group in groups]
        held = [(node, values[start:stop]) for node, values in entries]
        exchanges.append(
            between(replace(part, members=members, nodes=nodes, held=held, total=destination[start:stop], _messages=[]))
        )
    # Messages of several slices to one rank have the same tags. They arrive in the order in which they were posted.
    for rounds in zip_longest(*exchanges):
        yield [message for messages in rounds for message in messages or ()]
    for peer in peers:
        part.send(destination, peer, RESULT)
        part.receive(region(part.total, peer), peer, RESULT)
    if peers:
        yield part.round()


def _slices(place: int, num_ranks: int, num_slices: int) -> tuple[int, int]:
    """Return the slices [first, last) of a rank of a machine."""
    return place * num_slices // num_ranks, (place + 1) * num_slices // num_ranks


@lru_cache(64)  # the same in all steps of a run, but for those after a loss
def _layout(
    machines: tuple[int, ...], nodes: tuple[tuple[Node, ...], ...], num_leaves: int, exact: bool
) -> tuple[list[list[int]], list[list[Node]]]:
    """Return the members of each machine, and its nodes. Machines are in the order of their leaves."""
    found = []
    for machine in dict.fromkeys(machines):
        group = [place for place, each in enumerate(machines) if each == machine]
        own = sorted(node for place in group for node in nodes[place])
        if exact:
            own = merged(own, num_leaves)
        elif own:
            own = [(own[0][0], own[-1][1])]
        found.append((own, group))
    found.sort(key=lambda entry: entry[0][0] if entry[0] else (num_leaves, num_leaves))
    return [group for _, group in found], [own for own, _ in found]


@lru_cache(64)
def shares(num_nodes: tuple[int, ...]) -> list[int]:
    """Return the share of the values that each machine adds, by its nodes, so that the busiest link carries the least.

    A machine sends its nodes of what others add, and the sum of what it adds to all others. So a machine with several
    nodes adds more: of two machines, one with 2 nodes adds all, and both send each value once instead of 1.5 times.
    """
    size, every = len(num_nodes), sum(num_nodes)
    if {*num_nodes} == {1}:
        return [1] * size
    units, num_units = [0] * size, 16 * size

    def busiest(taken: int) -> int:
        """Return what the busiest link carries in either direction, in units, if one more is added there."""
        loads = []
        for machine, nodes in enumerate(num_nodes):
            own = units[machine] + (machine == taken)
            loads += [nodes * (num_units - own) + (size - 1) * own, (every - nodes) * own + num_units - own]
        return max(loads)

    for _ in range(num_units):
        # The lowest of several, so that all ranks agree.
        units[min(range(size), key=lambda machine: (busiest(machine), units[machine], machine))] += 1
    return units
