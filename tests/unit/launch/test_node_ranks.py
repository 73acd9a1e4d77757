"""Node ranks that users assign to machines."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from samebits.errors import LaunchError
from samebits.launch.nodes.board import NodeState, check_node_rank, missing_node_ranks, next_view
from samebits.launch.nodes.rendezvous import compare, describe_run
from samebits.process_range import ProcessRange, RendezvousConfig

MINE = NodeState(1, socket.gethostname(), os.getpid(), 2, "127.0.0.1", 1, rank=1)
DEAD_PID = 2**22 + 1  # above the largest process id


def states(*given: NodeState) -> dict[int, NodeState]:
    return {state.node: state for state in given}


def of_rank(rank: int | None, node: int = 0) -> NodeState:
    return replace(MINE, node=node, rank=rank, host="elsewhere", pid=77)


def test_ranks_that_no_machine_has_are_known() -> None:
    assert missing_node_ranks(states(MINE), 3) == "missing node ranks 0 2"
    assert missing_node_ranks(states(of_rank(0), MINE), 3) == "missing node rank 2"
    assert missing_node_ranks(states(of_rank(0), MINE), 2) == ""
    assert missing_node_ranks(states(replace(MINE, rank=None)), 3) == ""


def test_a_rank_that_another_machine_has_is_refused_with_both_names() -> None:
    with pytest.raises(LaunchError, match="two machines have node rank 1") as caught:
        check_node_rank(MINE, states(of_rank(1), MINE))
    assert f"elsewhere pid 77\n{socket.gethostname()} pid {os.getpid()}" in caught.value.slots["where"]


@pytest.mark.parametrize(
    "other",
    [
        replace(MINE, node=0, pid=DEAD_PID),
        of_rank(1, node=2),  # it came later, and is refused itself
        of_rank(0),
        of_rank(None),
    ],
)
def test_a_rank_of_a_launcher_that_has_died_here_or_came_later_is_free(other: NodeState) -> None:
    check_node_rank(MINE, states(other, MINE))
    check_node_rank(replace(MINE, rank=None), states(replace(other, rank=None), MINE))


def test_different_numbers_of_machines_are_refused() -> None:
    two, three = (
        describe_run(RendezvousConfig(ProcessRange(n, n), "a:1", "run", 9.0, 1.0, 9.0, Path("runs/a"), rank=0))
        for n in (2, 3)
    )
    assert compare(two, three, True) == ["--nodes: 2 there, 3 here"]


def test_ranks_of_processes_follow_the_ranks_of_machines() -> None:
    view = next_view(0, [MINE, of_rank(0, node=2)], set(), 2)
    assert [(node, first) for node, first, _ in view.members] == [(2, 0), (1, 2)]
