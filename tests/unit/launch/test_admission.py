"""Launchers that join: which may, their ranks, their waits, and those that are silent."""

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore

from samebits.cluster.views.membership import mark_path
from samebits.errors import LaunchError
from samebits.launch.crew.crew import Entry
from samebits.launch.crew.recovering_crew import RecoveringCrew
from samebits.launch.nodes import auth, board, rendezvous
from samebits.launch.nodes.board import (
    EXCHANGE_S,
    SETTLING_S,
    SILENT_LOOKS,
    SILENT_S,
    NodeState,
    SilentNodes,
    check_node_rank,
    missing_node_ranks,
    next_view,
)
from samebits.launch.nodes.rendezvous import NodeRendezvous, compare, describe_run
from samebits.launch.start import shared_settings
from samebits.launch.supervisor import Supervisor
from samebits.process_range import ProcessRange, RendezvousConfig
from tests.runs import own_port
from tests.unit.launch.meeting import Meeting, a_store


def nodes(folder: Path, **changes: object) -> RendezvousConfig:
    plain = RendezvousConfig(
        ProcessRange(2, 2), "127.0.0.1:1", folder.name, 10.0, 1.0, 10.0, folder=folder, shared={"seed": "0"}
    )
    return dataclasses.replace(plain, **changes)


def refused(store: HashStore, given: RendezvousConfig) -> str:
    before = store.num_keys()
    with pytest.raises(LaunchError) as caught:
        rendezvous.check(store, given)
    assert store.num_keys() == before
    return str(caught.value)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_the_same_run_may_join_from_where_its_folder_is_mounted_elsewhere(store: HashStore, tmp_path: Path) -> None:
    rendezvous.publish(store, nodes(tmp_path / "disk" / "run"))
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")
    rendezvous.check(store, nodes(tmp_path / "disk" / "run"))
    rendezvous.check(store, nodes(tmp_path / "mounted" / "run"))


def test_machines_without_a_shared_disk_have_the_folder_at_one_path(store: HashStore, tmp_path: Path) -> None:
    rendezvous.publish(store, nodes(tmp_path / "run"))
    (tmp_path / "run").rmdir()
    rendezvous.check(store, nodes(tmp_path / "run"))


def test_a_relative_folder_may_be_given_in_different_working_folders(
    store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    rendezvous.publish(store, nodes(Path("runs/two")))
    monkeypatch.chdir(tmp_path / "b")
    rendezvous.check(store, nodes(Path("runs/two")))
    assert "run folder: " in refused(store, nodes(Path("../b/runs/two")))
    # Without SAMEBITS_KEY, the key is in the run folder, which is another one.
    monkeypatch.delenv("SAMEBITS_KEY", raising=False)
    monkeypatch.setattr(auth, "GREETING_S", 0.2)
    _, file = auth.exchange_key(store, nodes(tmp_path / "a" / "runs" / "two"))
    with pytest.raises(LaunchError, match="cannot prove that it belongs to the run") as caught:
        auth.find_key(store, nodes(Path("runs/two")))
    assert "the working folders differ" in caught.value.slots["cause"]
    file.remove()


def test_what_differs_is_named(store: HashStore, tmp_path: Path) -> None:
    rendezvous.publish(store, nodes(tmp_path / "run"))
    assert "seed: 0 there, 7 here" in refused(store, nodes(tmp_path / "run", shared={"seed": "7"}))
    assert "lr: none there, 1 here" in refused(store, nodes(tmp_path / "run", shared={"seed": "0", "lr": "1"}))
    assert "--nodes: 2 there, 2:3 here" in refused(store, nodes(tmp_path / "run", size=ProcessRange(2, 3)))
    assert "run: run there, other here" in refused(store, nodes(tmp_path / "other"))
    assert "run folder: " in refused(store, nodes(tmp_path / "b" / "run"))


def test_an_id_that_the_user_gave_overrides_the_folder_but_not_the_settings(store: HashStore, tmp_path: Path) -> None:
    mine = {"run_id": "a", "has_own_id": True}
    rendezvous.publish(store, nodes(tmp_path / "run", **mine))
    rendezvous.check(store, nodes(tmp_path / "other", **mine))
    assert "seed: 0 there, 7 here" in refused(store, nodes(tmp_path / "run", shared={"seed": "7"}, **mine))
    assert "run: a there, run here" in refused(store, nodes(tmp_path / "run"))


def test_a_store_without_a_record_is_left_alone(
    store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "RECORD_S", 0.1)
    assert "does not belong to a run of samebits train --nodes" in refused(store, nodes(tmp_path / "run"))


def test_a_server_that_ends_meanwhile_is_an_error_with_a_text(tmp_path: Path) -> None:
    class Broken:
        def compare_set(self, *_: str) -> bytes:
            raise DistNetworkError("Connection reset by peer")

    with pytest.raises(LaunchError, match=r"lost the rendezvous at 127.0.0.1:1 while it joined"):
        rendezvous.admit(Broken(), nodes(tmp_path / "run"), serves=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [b"", b"\xff", b"[]", b"{}", b'{"shared": 1}', 10**5 * b"["])
def test_a_damaged_record_is_an_error_with_a_text(store: HashStore, tmp_path: Path, record: bytes) -> None:
    store.set(rendezvous.OWNER, record)
    assert "is damaged" in refused(store, nodes(tmp_path / "run"))


def test_a_forged_record_cannot_write_to_the_terminal(store: HashStore, tmp_path: Path) -> None:
    rendezvous.publish(store, nodes(tmp_path / "run"))
    record = json.loads(store.get(rendezvous.OWNER))
    escape = "\x1b]0;owned\x07\nconfig"
    record |= {"user": escape, "host": escape, "shared": {escape: escape}}
    store.set(rendezvous.OWNER, json.dumps(record))
    text = refused(store, nodes(tmp_path / "run"))
    assert "\x1b" not in text
    assert "\nconfig" not in text


def test_shared_settings_follow_the_recipe_file_and_not_where_the_data_is(tmp_path: Path) -> None:
    recipe = tmp_path / "r.py"
    recipe.write_text("a = 1")
    first = shared_settings({"seed": 0, "data": {"root": "a", "size": 3}}, str(recipe))
    assert first == shared_settings({"seed": 0, "data": {"root": "b", "size": 3}}, str(recipe))
    recipe.write_text("a = 2")
    assert first != shared_settings({"seed": 0, "data": {"root": "a", "size": 3}}, str(recipe))
    assert first["setting data.size"] == "3"


def open_rendezvous(folder: Path) -> NodeRendezvous:
    return NodeRendezvous(nodes(folder, endpoint=f"127.0.0.1:{own_port()}"), lambda: None, lambda _: None)


@pytest.mark.parametrize("key", ["", "k" * 40])
def test_a_rendezvous_that_no_node_joined_leaves_no_folder_but_the_user_s_own(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBITS_KEY", key)
    (tmp_path / "own").mkdir()
    for name in ("made", "own"):
        met = open_rendezvous(tmp_path / name)
        assert (tmp_path / name).is_dir()
        met.end(4, "no node joined")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_launcher_that_fails_while_it_joins_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> None:
        raise DistNetworkError("the connection is broken")

    monkeypatch.setattr(rendezvous, "publish", lose)
    with pytest.raises(LaunchError, match="lost the rendezvous"):
        open_rendezvous(tmp_path / "run")
    assert not (tmp_path / "run").exists()


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


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(board.time, "monotonic", made.monotonic)
    return made


def seconds_until(
    clock: Clock, look: Callable[[int], set[int]], silent: set[int], every_s: float = EXCHANGE_S
) -> float:
    """Return how long it takes until these nodes are silent; `look` gets a count that grows with each look."""
    began, count = clock.now, 1
    while look(count) != silent:
        assert clock.now < began + 2000.0
        clock.now += every_s
        count += 1
    return clock.now - began


def test_a_node_whose_count_stands_still_is_silent_and_comes_back(clock: Clock) -> None:
    silence = SilentNodes(10.0)
    assert seconds_until(clock, lambda count: silence.look({0: count, 1: 5}, False), {1}) == pytest.approx(
        10.0, abs=0.1
    )
    assert silence.has_timed_out(1)
    assert not silence.has_timed_out(0)
    assert silence.look({0: 10**6, 1: 6}, False) == set()
    assert not silence.has_timed_out(1)


def test_a_node_that_is_silent_after_a_broken_connection_is_lost_soon(clock: Clock) -> None:
    silence = SilentNodes(900.0)
    assert silence.look({0: 1, 1: 1, 2: 1}, False) == set()
    took = seconds_until(clock, lambda count: silence.look({0: count, 1: 1, 2: count}, True), {1})
    assert SILENT_S <= took < SILENT_S + 3 * EXCHANGE_S
    assert not silence.has_timed_out(1), "that takes 900 s"
    for _ in range(100):  # long after it has settled
        clock.now += EXCHANGE_S
        assert 1 in silence.look({1: 1}, False), "lost, until it writes again"
    assert silence.look({1: 2}, False) == set()


@pytest.mark.parametrize("pause_s", [0.0, 1.1 * SETTLING_S])
def test_a_second_node_that_is_lost_during_the_recovery_is_lost_soon(clock: Clock, pause_s: float) -> None:
    silence = SilentNodes(900.0)
    seconds_until(clock, lambda count: silence.look({1: 1, 2: count}, True), {1})
    # The next view has begun, in which no connection breaks, since the third node has made none; on a busy machine.
    clock.now += pause_s
    took = seconds_until(clock, lambda count: silence.look({1: 1, 2: 10**6}, False), {1, 2})
    assert took <= SILENT_LOOKS * max(SILENT_S, pause_s) + 3 * EXCHANGE_S


def test_the_others_are_not_silent_during_a_pause_of_the_store_or_of_this_launcher(clock: Clock) -> None:
    silence = SilentNodes(10.0)
    assert silence.look({0: 1, 1: 1}, False) == set()
    clock.now += 60.0
    assert silence.look({0: 2, 1: 1}, False) == set()
    assert seconds_until(clock, lambda count: silence.look({0: 2 + count, 1: 1}, False), {1}) > 5.0


def test_a_launcher_that_looks_seldom_does_not_take_others_for_silent(clock: Clock) -> None:
    silence = SilentNodes(900.0)
    silence.look({1: 1}, True)
    for _ in range(SILENT_LOOKS):
        assert silence.look({1: 1}, True) == set()
        clock.now += SILENT_S
    assert seconds_until(clock, lambda count: silence.look({1: 1}, True), {1}, every_s=SILENT_S) <= 2 * SILENT_S


@pytest.mark.parametrize("limit_s", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("every_s", [EXCHANGE_S, 2 * EXCHANGE_S])
def test_nodes_that_exchange_as_they_should_are_never_silent(clock: Clock, limit_s: float, every_s: float) -> None:
    first, second = SilentNodes(limit_s), SilentNodes(limit_s)
    for count in range(400):
        is_broken = 100 <= count < 102  # only one of them sees it
        assert (
            first.look({0: count, 1: count // 2}, is_broken) == second.look({0: count, 1: count // 2}, False) == set()
        )
        clock.now += every_s


def wait(size: tuple[int, int], num_ready: int, why: rendezvous.Wait) -> str:
    nodes = RendezvousConfig(ProcessRange(*size), "a:29400", "run", 60.0, 5.0, 10.0, Path("runs/a"))
    return rendezvous.describe_wait(nodes, num_ready, "NAMES", why, 20.0)


def test_a_wait_for_too_few_nodes_names_the_time_until_it_gives_up() -> None:
    text = "waiting for 2 nodes at a:29400: 1 has joined (NAMES), 20 s\n  giving up in 0:40 (cluster.join_timeout_s)"
    assert wait((2, 2), 1, "first") == text


def test_a_world_with_enough_nodes_waits_for_more_and_does_not_give_up() -> None:
    text = wait((1, 2), 1, "first")
    assert text.startswith("1 of 1 to 2 nodes has joined at a:29400")
    assert "giving up" not in text
    assert "starting 5 s after the first 1 (cluster.last_call_s)" in text


@pytest.mark.parametrize(
    ("why", "size", "start"),
    [
        ("others", (1, 2), "waiting for the other nodes of the last world (NAMES), 20 s\n  lost after 10 s"),
        ("turn", (1, 2), "waiting until the run at a:29400 has saved and accepts this node (NAMES)"),
        ("turn", (1, 1), "the run at a:29400 has all of its 1 nodes (NAMES)"),
    ],
)
def test_a_node_outside_of_a_complete_world_reports_why_it_waits(
    why: rendezvous.Wait, size: tuple[int, int], start: str
) -> None:
    assert wait(size, 1, why).startswith(start)


def test_a_refused_launcher_is_named_to_those_that_wait(tmp_path: Path) -> None:
    store = HashStore()
    error = LaunchError("another run uses a:1", given="seed: 0 there, 7 here\nlr: 1 there, 2 here")
    rendezvous.report_refusal(store, error)
    assert store.num_keys() == 0  # a store of another program
    store.set(rendezvous.OWNER, "{}")
    rendezvous.report_refusal(store, error)
    assert rendezvous.read_refusal(store).endswith(
        " was refused: another run uses a:1 (seed: 0 there, 7 here; lr: 1 there, 2 here)"
    )


def test_an_interrupted_launcher_leaves_no_note() -> None:
    store = HashStore()
    store.set(rendezvous.OWNER, "{}")
    rendezvous.report_refusal(store, KeyboardInterrupt())
    assert store.num_keys() == 1


@pytest.mark.parametrize("note", [b"\xff", b"[]", b"{}", 10**5 * b"[", b"1"])
def test_a_damaged_note_is_left_out(note: bytes) -> None:
    store = HashStore()
    store.set(rendezvous.REFUSED, note)  # type: ignore[arg-type]  # bytes are taken too
    assert rendezvous.read_refusal(store) == ""


def test_a_forged_note_cannot_write_to_the_terminal() -> None:
    store = HashStore()
    store.set(rendezvous.REFUSED, json.dumps({"host": "\x1b]0;owned\x07", "text": "a\nconfig error: b\u202e"}))
    text = rendezvous.read_refusal(store)
    assert text.isprintable()
    assert "\n" not in text


def train_nothing(folder: Path, number: int) -> int:
    """Make the marks of a process that completes its run, once there is a file called end."""
    for name in ("ready", "member"):
        mark_path(folder, name, number).touch()
    end = time.monotonic() + 60.0
    while not (folder / "end").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return 0


def test_a_process_that_is_done_between_two_looks_at_it_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = RecoveringCrew._publish

    def publish_late(crew: RecoveringCrew) -> None:
        for member in crew._processes.values():
            if member.has_marked("member"):
                (tmp_path / "end").touch()
                member.process.join(60.0)  # it was running when the crew looked at it a moment ago
        publish(crew)

    monkeypatch.setattr(RecoveringCrew, "_publish", publish_late)
    store = a_store()
    entry = Entry(train_nothing, (tmp_path, 0), tmp_path, 0.0, "")
    nodes = RendezvousConfig(ProcessRange(1, 1), "127.0.0.1:29500", "run", 60.0, 0.0, 10.0, tmp_path)
    crew = RecoveringCrew(
        entry, Supervisor(tmp_path, 10.0, None, lambda: "stopping"), num_procs=1, min_procs=1, max_restarts=0,
        rendezvous=Meeting(nodes, store),
    )  # fmt: skip
    has_failed, results = crew.run()
    crew.end(int(has_failed), "")
    assert not has_failed
    assert [result.code for result in results.values()] == [0]
