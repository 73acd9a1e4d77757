"""The rounds in which ranks exchange small sums: with all others at once, or by recursive doubling in a large world.

Gradients are halved (`halving.py`) since their bytes count. Sums inside a pass are a few kilobytes, so only messages
count: in each round a rank sends all that it holds to one partner. Eight ranks with a node each, seen from rank 0:

    round 0   send (0,1) to rank 1, receive (1,2)      hold (0,2)
    round 1   send (0,2) to rank 2, receive (2,4)      hold (0,4)
    round 2   send (0,4) to rank 4, receive (4,8)      hold (0,8), the total

Neighbors hold neighboring micro-batches, so partners add siblings of `tree.py`. With W between two powers of two,
some ranks (guests) first give their nodes to their left neighbor (host), and receive the total from it at the end.

Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH (2005).
"""

from collections.abc import Sequence
from typing import NamedTuple

from samebits.parallel.exchange.halving import follow_each_other, is_in_rounds
from samebits.parallel.tree import Node, merged


class Round(NamedTuple):
    """Messages that a rank sends and receives at the same time."""

    sends_to: tuple[int, ...]  #: Ranks that receive all nodes that this rank holds.
    nodes_from: dict[int, list[Node]]  #: The nodes that other ranks send, by rank.
    is_total: bool = False  #: Whether the received nodes contain those that were sent.


def plan_rounds(rank: int, nodes: Sequence[list[Node]], num_leaves: int, num_bytes: int) -> list[Round]:
    """Return the rounds of a rank that has nodes; none if no other rank has any."""
    # A rank without a micro-batch contributes nothing and needs no total.
    members = [other for other, own in enumerate(nodes) if own]
    if not (is_in_rounds(len(members), num_bytes) and follow_each_other(nodes)):
        peers = [other for other in members if other != rank]
        return [Round((*peers,), {peer: nodes[peer] for peer in peers})] if peers else []
    num_rounds = len(members).bit_length() - 1
    num_pairs = len(members) - (1 << num_rounds)  # of host and guest: the first members

    def held(first: int, last: int) -> list[Node]:
        return merged([node for member in members[first:last] for node in nodes[member]], num_leaves)

    def index(place: int) -> int:
        return place + min(place, num_pairs)

    mine = members.index(rank)
    is_paired = mine < 2 * num_pairs
    if is_paired and mine % 2:
        return [Round((members[mine - 1],), {members[mine - 1]: held(0, len(members))}, is_total=True)]
    place, rounds = mine // 2 if is_paired else mine - num_pairs, []
    for number in range(num_rounds):
        partner = place ^ (1 << number)
        group = partner >> number << number
        other = members[index(partner)]
        rounds.append(Round((other,), {other: held(index(group), index(group + (1 << number)))}))
    if is_paired:
        guest = members[mine + 1]
        rounds = [Round((), {guest: nodes[guest]}), *rounds, Round((guest,), {})]
    return rounds
