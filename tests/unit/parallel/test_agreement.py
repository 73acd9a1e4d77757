"""The protocol of in-step recovery, enumerated: all moments of all crashes in small worlds, with all orders of events.

A simulated rank computes leaves, sends its sums, adds all of them (its own are then overwritten), and applies the step
once it has every rank's part of the result. Values are symbols, so each sum shows which leaves it has, in which
brackets, and with which weights they were computed. `agree`, `deal` and `rank_nodes` are those that training uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from samebits.data.division import part
from samebits.parallel.recoverable import Agreement, RankReport, agree
from samebits.parallel.tree import push, rank_nodes

NUM_STEPS = 2
COMPUTES, HAS_SENT, HAS_ADDED = 0, 1, 2


def add(left: Any, right: Any) -> Any:
    return (left, right)


def leaf_value(history: tuple[Any, ...], leaf: int) -> Any:
    """A micro-batch's gradient with certain weights: here the number of steps they have, since these are right."""
    return f"g{len(history)}.{leaf}"


def tree_sum(nodes: list[tuple[Any, Any]], num_leaves: int) -> Any:
    stack: list[Any] = []
    for node, value in sorted(nodes):
        push(stack, node, value, num_leaves, add)
    ((whole, value),) = stack
    assert whole == (0, num_leaves)
    return value


def undisturbed(num_leaves: int) -> tuple[Any, ...]:
    steps = [[((leaf, leaf + 1), f"g{step}.{leaf}") for leaf in range(num_leaves)] for step in range(NUM_STEPS)]
    return tuple(tree_sum(nodes, num_leaves) for nodes in steps)


@dataclass(frozen=True)
class Rank:
    """A process: the steps that it has applied, its sums of the next one, and what it still computes."""

    history: tuple[Any, ...] | None
    nodes: tuple[Any, ...] = ()
    todo: tuple[int, ...] = ()
    phase: int = COMPUTES
    # The step's sum, once it has added; its own nodes are overwritten by then.
    total: Any = None
    is_alive: bool = True
    # The agreement of the world that this process is entering, and its rank there.
    pending: tuple[Agreement, int] | None = None


@dataclass(frozen=True)
class World:
    """All processes, and the messages that were delivered: (step, round, sender, receiver) -> nodes."""

    ranks: tuple[Rank, ...]
    members: tuple[int, ...]
    messages: frozenset[Any] = field(default=frozenset())
    crashes_left: int = 0
    replacements_left: int = 0

    def with_rank(self, number: int, rank: Rank, messages: frozenset[Any] | None = None) -> World:
        ranks = (*self.ranks[:number], rank, *self.ranks[number + 1 :])
        return replace(self, ranks=ranks, messages=self.messages if messages is None else messages)


def first_world(size: int, num_leaves: int, num_crashes: int, num_replacements: int) -> World:
    ranks = tuple(Rank((), todo=tuple(range(*part(0, num_leaves, size, rank)))) for rank in range(size))
    return World(ranks, tuple(range(size)), frozenset(), num_crashes, num_replacements)


def own_step(world: World, number: int, num_leaves: int) -> World | None:
    """The next thing that a process does by itself; None while it waits."""
    rank = world.ranks[number]
    if rank.pending is not None:
        return moved(world, number, num_leaves)
    assert rank.history is not None
    step = len(rank.history)
    if step == NUM_STEPS:
        return None
    if rank.todo:
        leaf, *todo = rank.todo
        nodes = list(rank.nodes)
        push(nodes, (leaf, leaf + 1), leaf_value(rank.history, leaf), num_leaves, add)
        return world.with_rank(number, replace(rank, nodes=tuple(nodes), todo=tuple(todo)))
    others = [other for other in world.members if other != number]
    if rank.phase == COMPUTES:
        assert rank.nodes or world.members[0] != number, "rank 0 sends the flag with its first node"
        return sent(world, number, replace(rank, phase=HAS_SENT), step, 1, rank.nodes)
    mine = (step, rank.phase, number)
    received = {sender: nodes for at, kind, sender, to, nodes in world.messages if (at, kind, to) == mine}
    if any(other not in received for other in others):
        return None
    if rank.phase == HAS_SENT:
        every = [*rank.nodes, *itertools.chain.from_iterable(received.values())]
        total = ((0, num_leaves), tree_sum(every, num_leaves))
        overwritten = tuple((node, "overwritten") for node, _ in rank.nodes)
        after = replace(rank, phase=HAS_ADDED, nodes=overwritten, total=total[1])
        return sent(world, number, after, step, 2, (total,))
    history = (*rank.history, rank.total)
    todo = tuple(range(*part(0, num_leaves, len(world.members), world.members.index(number))))
    return world.with_rank(number, Rank(history, todo=todo if step + 1 < NUM_STEPS else ()))


def sent(world: World, number: int, rank: Rank, step: int, kind: int, nodes: tuple[Any, ...]) -> World:
    added = {(step, kind, number, other, nodes) for other in world.members if other != number}
    return world.with_rank(number, rank, world.messages | added)


def moved(world: World, number: int, num_leaves: int) -> World | None:
    """A process enters the new world: it receives weights if it needs them, and keeps the sums that were agreed on."""
    rank = world.ranks[number]
    assert rank.pending is not None
    agreement, place = rank.pending
    history = rank.history
    if place in agreement.receivers:
        source = world.ranks[world.members[agreement.source]]
        if not source.is_alive:
            return None
        assert source.history is not None
        history = source.history[: agreement.num_steps]
    held = tuple(entry for entry in rank.nodes if entry[0] in agreement.held[place])
    todo = agreement.deal(num_leaves)[place] if agreement.num_steps < NUM_STEPS else ()
    (planned,) = rank_nodes((todo,), num_leaves, (agreement.held[place],))
    assert {leaf for first, last in planned for leaf in range(first, last)} >= set(todo)
    return world.with_rank(number, Rank(history, held, todo))


def crashed(world: World, number: int) -> Iterator[World]:
    """A process is killed; of the messages that it sent to each other process, the last ones may be lost."""
    rank = replace(world.ranks[number], is_alive=False)
    by_receiver: dict[int, list[Any]] = {}
    for message in sorted((each for each in world.messages if each[2] == number), key=lambda each: each[:4]):
        by_receiver.setdefault(message[3], []).append(message)
    endings = [[set(found[count:]) for count in range(len(found) + 1)] for found in by_receiver.values()]
    for lost in itertools.product(*endings):
        messages = world.messages - set().union(*lost) if lost else world.messages
        yield replace(world.with_rank(number, rank, messages), crashes_left=world.crashes_left - 1)


def regrouped(world: World) -> Iterator[World]:
    """The launcher has named the members that remain, with or without a replacement, and they agree."""
    alive = [number for number in world.members if world.ranks[number].is_alive]
    for num_new in range(world.replacements_left + 1):
        ranks = [*world.ranks, *[Rank(None)] * num_new]
        members = (*alive, *range(len(world.ranks), len(ranks)))
        reports = [report(ranks[number]) for number in members]
        if all(each.num_steps < 0 for each in reports):
            continue
        agreement = agree(reports)
        for place, number in enumerate(members):
            ranks[number] = replace(ranks[number], pending=(agreement, place))
        yield replace(
            world, ranks=tuple(ranks), members=members, messages=frozenset(),
            replacements_left=world.replacements_left - num_new,
        )  # fmt: skip


def report(rank: Rank) -> RankReport:
    if rank.history is None:
        return RankReport(-1)
    nodes = tuple(node for node, _ in rank.nodes) if rank.phase != HAS_ADDED else ()
    return RankReport(len(rank.history), 0, nodes)


def explore(world: World, num_leaves: int) -> tuple[int, int]:
    """Walk through all states; return how many there are, and how many are ends."""
    expected = undisturbed(num_leaves)
    seen, stack, num_ends = {world}, [world], 0
    while stack:
        now = stack.pop()
        alive = [number for number in now.members if now.ranks[number].is_alive]
        following = [after for number in alive if (after := own_step(now, number, num_leaves)) is not None]
        if now.crashes_left and len(alive) > 1:
            following += [after for number in alive for after in crashed(now, number)]
        if len(alive) < len(now.members):
            following += list(regrouped(now))
        for number in alive:
            history = now.ranks[number].history
            assert history is None or history == expected[: len(history)], "a step was summed in another way"
        if not following and any(now.ranks[number].history is not None for number in alive):
            num_ends += 1
            for number in alive:
                assert now.ranks[number].history == expected, f"a process stays behind: {now}"
        for after in following:
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return len(seen), num_ends


@pytest.mark.parametrize(
    ("size", "num_leaves", "num_crashes", "num_replacements"),
    [
        (2, 3, 1, 0),
        (2, 2, 1, 1),
        (3, 2, 1, 0),
        pytest.param(3, 3, 1, 1, marks=pytest.mark.full),
        pytest.param(3, 4, 2, 0, marks=pytest.mark.full),
    ],
)
def test_every_crash_ends_in_the_sums_of_an_undisturbed_run(
    size: int, num_leaves: int, num_crashes: int, num_replacements: int
) -> None:
    states, ends = explore(first_world(size, num_leaves, num_crashes, num_replacements), num_leaves)
    assert states > 100
    assert ends > 0
    print(f"{states:,} states, {ends:,} ends")


def test_a_rank_that_has_applied_the_step_sends_its_weights_to_the_others() -> None:
    agreement = agree([RankReport(6, 0, ((0, 2),)), RankReport(7, 0), RankReport(-1)])
    assert (agreement.num_steps, agreement.source, agreement.receivers) == (7, 1, (0, 2))
    assert agreement.held == ((), (), ())
    assert agreement.deal(8) == ((0, 1, 2), (3, 4, 5), (6, 7))


def test_only_the_micro_batches_that_nobody_has_summed_are_dealt() -> None:
    agreement = agree([RankReport(6, 6, ((0, 2), (2, 3))), RankReport(6, 0, ((5, 6),))])
    assert agreement.deal(8) == ((3, 4), (6, 7))
    assert rank_nodes(agreement.deal(8), 8, agreement.held)[0] == [(0, 4), (4, 5)]
    assert agreement.evaluated_step == 0


def test_two_sums_of_one_micro_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="two ranks hold"):
        agree([RankReport(6, 0, ((0, 2),)), RankReport(6, 0, ((1, 2),))])


def test_a_world_without_weights_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rank has weights"):
        agree([RankReport(-1), RankReport(-1)])
