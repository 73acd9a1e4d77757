"""The launchers' files in the run folder: one view for each number, and nodes that are silent are lost."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from samebits.cluster.views.membership import View
from samebits.errors import LaunchError
from samebits.launch.crew import shared_folder
from samebits.launch.crew.shared_folder import (
    SETTLING_S,
    SILENT_LOOKS,
    SILENT_S,
    NodeStatus,
    SharedFolder,
    make_shared_folder,
)

NONE = View(-1, 0, ())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_shared_folder(tmp_path / "run", "one")


def look(launcher: SharedFolder, found: set[int], *others: SharedFolder) -> None:
    """Let a launcher look, and others write their status as it does, until these nodes are not lost to it."""
    end = time.monotonic() + 60.0
    while launcher.statuses().keys() != found:
        assert time.monotonic() < end
        for shared in (launcher, *others):
            shared.publish(NodeStatus(shared.node))
        time.sleep(0.005)


def test_of_two_launchers_that_begin_a_view_one_succeeds(path: Path) -> None:
    first, second = SharedFolder(path, 1.0), SharedFolder(path, 1.0)
    assert (first.node, second.node) == (0, 1)
    mine, other = View(0, 7, (0, 1), node=0), View(0, 8, (1,), node=1)
    assert first.begin(mine) == mine
    assert second.begin(other) == mine
    assert second.newest(NONE) == mine


def test_a_view_stays_as_it_was_when_the_next_one_begins(path: Path) -> None:
    shared = SharedFolder(path, 1.0)
    views = [View(number, number, (0,)) for number in range(3)]
    assert [shared.begin(view) for view in views] == views
    late = SharedFolder(path, 1.0)
    assert [late.begin(View(number, 99, (5,))) for number in range(3)] == views
    assert late.newest(NONE) == views[2], "an old view has replaced the newest one"


def test_a_silent_node_is_lost_and_an_ended_one_is_not(path: Path) -> None:
    first, second, third = (SharedFolder(path, 0.2) for _ in range(3))
    for shared in (first, second):
        shared.publish(NodeStatus(shared.node, members={shared.node: "member"}))
    third.leave(NodeStatus(third.node, members={2: "done"}), is_end=True)
    assert first.statuses().keys() == {0, 1, 2}
    look(first, {0, 2})
    second.publish(NodeStatus(second.node))
    assert first.statuses().keys() == {0, 1, 2}


def test_a_node_that_is_silent_after_a_broken_connection_is_lost_soon(path: Path) -> None:
    first, second, third = (SharedFolder(path, 900.0) for _ in range(3))
    for shared in (first, second, third):
        shared.publish(NodeStatus(shared.node))
    assert first.statuses(4).keys() == {0, 1, 2}
    third.publish(NodeStatus(third.node, broken=3))  # of an earlier view
    assert first.statuses(4).keys() == {0, 1, 2}
    assert not first.is_broken
    third.publish(NodeStatus(third.node, broken=4))
    at = time.monotonic()
    assert first.statuses(4).keys() == {0, 1, 2}
    assert first.is_broken
    while len(found := first.statuses(4).keys()) == 3:
        assert time.monotonic() < at + 100.0
        time.sleep(0.01)
        first.publish(NodeStatus(first.node))
        third.publish(NodeStatus(third.node, broken=4))
    assert found == {0, 2}
    assert time.monotonic() - at >= SILENT_S
    assert first.statuses(5).keys() == {0, 2}, "lost, until it writes again"
    second.publish(NodeStatus(second.node))
    assert first.statuses(5).keys() == {0, 1, 2}


@pytest.mark.parametrize("pause_s", [0.0, 1.1 * SETTLING_S])
def test_a_second_node_that_is_lost_during_the_recovery_is_lost_soon(path: Path, pause_s: float) -> None:
    first, second, third = (SharedFolder(path, 900.0) for _ in range(3))
    first.publish(NodeStatus(first.node, broken=4))
    for shared in (second, third):
        shared.publish(NodeStatus(shared.node))
    lost: list[int] = []
    at, present = time.monotonic(), 4
    while len(lost) < 2:
        assert time.monotonic() < at + 100.0
        found = first.statuses(present).keys()
        assert first.is_broken
        lost += sorted({1, 2} - found - {*lost})
        if lost:  # the next view has begun, in which no connection breaks, since the third node has made none
            time.sleep(pause_s if present == 4 else 0.0)  # on a busy machine
            present = 5
        else:
            third.publish(NodeStatus(third.node))
        first.publish(NodeStatus(first.node, broken=4))
        time.sleep(0.01)
    assert lost == [1, 2]


def test_a_node_that_is_lost_to_the_leader_is_lost_to_all_launchers(path: Path) -> None:
    first, second, third = (SharedFolder(path, timeout_s) for timeout_s in (900.0, 0.2, 900.0))
    for shared in (first, second, third):
        shared.publish(NodeStatus(shared.node))
    look(second, {0, 1}, first)
    assert first.statuses().keys() == {0, 1, 2}
    second.begin(View(1, 1, (0, 1)))
    assert first.statuses().keys() == {0, 1}
    third.publish(NodeStatus(third.node))  # it only seemed lost
    assert first.statuses().keys() == second.statuses().keys() == {0, 1, 2}
    second.begin(View(2, 2, (0, 1)))
    assert first.statuses().keys() == second.statuses().keys() == {0, 1, 2}


def test_the_last_node_removes_the_folder_though_another_one_found_the_loss(path: Path) -> None:
    first, second, third = (SharedFolder(path, timeout_s) for timeout_s in (900.0, 0.2, 900.0))
    for shared in (first, second, third):
        shared.publish(NodeStatus(shared.node))
    look(second, {0, 1}, first)
    second.begin(View(1, 1, (0, 1)))
    second.leave(NodeStatus(second.node), is_end=True)
    first.leave(NodeStatus(first.node), is_end=True)
    assert not path.parent.exists()


def test_a_status_that_a_lost_node_has_written_since_is_kept(path: Path) -> None:
    first, second = SharedFolder(path, 0.2), SharedFolder(path, 900.0)
    second.publish(NodeStatus(second.node))
    look(first, {0})
    second.leave(NodeStatus(second.node, failure="data error"), is_end=True)  # since that look
    first.begin(View(1, 1, (0,)))
    assert first.statuses()[1].failure == "data error"


@pytest.mark.parametrize("timeout_s", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("since_beat_s", [0.0, 0.2, 0.4])
def test_a_leader_that_began_the_next_view_early_is_not_silent(
    path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float, since_beat_s: float
) -> None:
    """Only the other launcher has seen the broken connection, for a moment, and it expects quick statuses then."""
    clock, poll_s = 100.0, 0.053
    monkeypatch.setattr(shared_folder.time, "monotonic", lambda: clock)
    leader, other = SharedFolder(path, timeout_s), SharedFolder(path, timeout_s)
    begun, written = clock + 1.0 + since_beat_s, {0: -1.0, 1: -1.0}
    while clock < begun + 3.0:
        is_begun, is_known = clock >= begun, clock >= begun + poll_s
        for shared, broken in ((leader, -1), (other, 0 if is_begun and not is_known else -1)):
            if broken == 0 or clock - written[shared.node] > (0.0 if shared.is_broken else shared.beat_s):
                shared.publish(NodeStatus(shared.node, broken=broken))
                written[shared.node] = clock
        assert leader.statuses(int(is_begun)).keys() == other.statuses(int(is_known)).keys() == {0, 1}
        clock += poll_s


def test_the_others_are_not_silent_during_a_pause_of_the_disk_or_of_this_launcher(path: Path) -> None:
    first, second = SharedFolder(path, 0.4), SharedFolder(path, 0.4)
    for shared in (first, second):
        shared.publish(NodeStatus(shared.node))
    assert first.statuses().keys() == {0, 1}
    time.sleep(0.6)
    first.publish(NodeStatus(first.node))
    assert first.statuses().keys() == {0, 1}
    look(first, {0})


def test_a_launcher_that_takes_all_others_for_lost_leaves_their_files(path: Path) -> None:
    first, second = SharedFolder(path, 0.2), SharedFolder(path, 0.2)
    second.publish(NodeStatus(second.node))
    look(first, {0})
    with second.beating(NodeStatus(second.node)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "statuses", dict)  # as before the other one could write again
        first.leave(NodeStatus(first.node), is_end=True)
    assert second.statuses().keys() == {1}


def test_a_status_that_cannot_be_read_once_is_the_last_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SharedFolder(path, 0.3), SharedFolder(path, 0.3)
    for shared in (first, second):
        shared.publish(NodeStatus(shared.node, members={shared.node: "member"}))
    found = first.statuses()
    read = Path.read_text

    def fail(file: Path, *args: Any, **given: Any) -> str:
        if file.name == "node-1.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(file, *args, **given)

    monkeypatch.setattr(Path, "read_text", fail)
    assert first.statuses() == found
    look(first, {0})  # it is silent


def test_a_full_disk_is_an_error_only_after_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, impatient = SharedFolder(path, 900.0), SharedFolder(path, 0.1)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        shared.publish(NodeStatus(0))
        assert shared.begin(View(0, 1, (0,))) is None
    shared.publish(NodeStatus(0))
    assert shared.begin(View(0, 1, (0,))) == View(0, 1, (0,))
    monkeypatch.setattr(Path, "write_text", fail)
    time.sleep(0.15)
    with pytest.raises(LaunchError, match="No space left on device") as caught:
        impatient.publish(NodeStatus(1))
    assert str(path) in str(caught.value)


def test_a_launcher_that_looks_seldom_does_not_take_others_for_silent(path: Path) -> None:
    first, second = SharedFolder(path, 900.0), SharedFolder(path, 900.0)
    first.publish(NodeStatus(first.node, broken=4))
    second.publish(NodeStatus(second.node))
    for _ in range(SILENT_LOOKS):
        assert first.statuses(4).keys() == {0, 1}
        time.sleep(SILENT_S)


def test_a_node_that_leaves_is_lost_at_once_and_the_last_one_removes_the_folder(path: Path) -> None:
    first, second = SharedFolder(path, 9.0), SharedFolder(path, 9.0)
    for shared in (first, second):
        shared.publish(NodeStatus(shared.node))
    first.leave(NodeStatus(first.node), is_end=False)
    assert second.statuses().keys() == {1}
    second.leave(NodeStatus(second.node), is_end=True)
    assert not path.parent.exists()


def test_a_new_start_removes_what_an_earlier_one_has_left(path: Path, tmp_path: Path) -> None:
    SharedFolder(path, 1.0).publish(NodeStatus(0))
    new = make_shared_folder(tmp_path / "run", "two")
    assert [entry.name for entry in path.parent.iterdir()] == ["two"]
    assert new.is_dir()


@pytest.mark.parametrize("name", [".crew", ".crew/old"])
def test_links_in_a_run_folder_of_a_stranger_lead_to_no_removal(tmp_path: Path, name: str) -> None:
    users = tmp_path / "users"
    (users / "one").mkdir(parents=True)
    for file in ("node-0.json", "letter.txt", "one/view-1.json"):
        (users / file).write_text("mine")
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(users)
    if name == ".crew":
        with pytest.raises(LaunchError, match=r"\.crew is a link"):
            make_shared_folder(tmp_path / "run", "one")
    else:
        assert make_shared_folder(tmp_path / "run", "one").is_dir()
    assert sorted(path.name for path in users.rglob("*")) == ["letter.txt", "node-0.json", "one", "view-1.json"]


def test_what_launchers_have_not_written_stays(tmp_path: Path) -> None:
    old = make_shared_folder(tmp_path, "old")
    SharedFolder(old, 1.0)
    (old / "letter.txt").write_text("mine")
    make_shared_folder(tmp_path, "new")
    assert [path.name for path in old.iterdir()] == ["letter.txt"]
