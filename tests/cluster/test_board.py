"""The exchange of launchers in a store: what strangers write there does not count, and who is silent is lost."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import hostile
from torch.distributed import TCPStore

from samebits.cluster.signed import Seal, SignedStore
from samebits.cluster.views.membership import View
from samebits.launch.nodes.board import NodeState, NodeView, StoreBoard
from tests.runs import LONG_S, wait_until

KEY = "a secret that strangers do not know"
STATE = NodeState(0, "host", 7, 1, "10.0.0.1", 29500)


@contextlib.contextmanager
def boards(count: int) -> Iterator[tuple[TCPStore, list[StoreBoard[NodeView]]]]:
    """The parts of several launchers in one exchange."""
    raw = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    made = [
        StoreBoard(SignedStore(raw, Seal(KEY, "run")), 60.0, replace(STATE, pid=10 + number), NodeView)
        for number in range(count)
    ]
    try:
        yield raw, made
    finally:
        for board in made:
            board.leave()


def test_launchers_ignore_states_and_views_that_none_of_them_has_written(tmp_path: Path) -> None:
    with boards(2) as (raw, (mine, theirs)):
        wait_until(lambda: mine.states().keys() == theirs.states().keys() == {0, 1}, LONG_S)
        names = ["state/0", "state/1", "state/2", "view/0", "view/1"]
        for only in range(len(hostile.garbage(tmp_path))):
            hostile.poison(raw, names, tmp_path / "canary", only)
        view = NodeView(0, ((0, 0, 1), (1, 1, 1)), 2, "10.0.0.1", 29500)
        mine.begin(view)
        wait_until(lambda: mine.view == theirs.view == view, LONG_S)
        assert mine.states().keys() == {0, 1}
        theirs.publish(replace(theirs.states()[1], ready=5))
        wait_until(lambda: mine.states()[1].ready == 5, LONG_S)
    assert not (tmp_path / "canary").exists()


def test_of_two_launchers_that_begin_a_view_one_succeeds() -> None:
    with boards(2) as (_, both):
        for number, board in enumerate(both):
            board.begin(NodeView(0, ((number, 0, 1),), 1, "10.0.0.1", 29500))
        wait_until(lambda: all(board.view is not None for board in both), LONG_S)
        assert both[0].view == both[1].view


def test_a_launcher_whose_state_stands_still_is_lost_and_comes_back() -> None:
    with boards(2) as (_, (mine, theirs)):
        mine._silence.limit_s = 1.0
        wait_until(lambda: 1 in mine.states(), LONG_S)
        with theirs._lock:  # its thread waits for this before each exchange
            wait_until(lambda: 1 not in mine.states(), LONG_S)
        wait_until(lambda: 1 in mine.states(), LONG_S)
        theirs.leave()
        wait_until(lambda: 1 not in mine.states(), LONG_S)
        assert mine.names({1}).endswith(" pid 11")


def test_an_older_state_written_once_more_is_refused() -> None:
    with boards(2) as (raw, (mine, theirs)):
        wait_until(lambda: 1 in mine.states(), LONG_S)
        old = raw.get("state/1")
        theirs.publish(replace(theirs.states()[1], ready=1))
        wait_until(lambda: mine.states()[1].ready == 1, LONG_S)
        theirs.leave()
        wait_until(lambda: 1 not in mine.states(), LONG_S)
        raw.set("state/1", old)  # type: ignore[arg-type]  # bytes are taken too
        time.sleep(0.5)
        assert 1 not in mine.states()


def test_views_of_processes_and_states_of_processes_come_as_they_were_written() -> None:
    raw = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    first, second = (StoreBoard(SignedStore(raw, Seal(KEY, "run")), 60.0, STATE, View) for _ in range(2))
    with contextlib.ExitStack() as stack:
        stack.callback(first.leave)
        stack.callback(second.leave)
        views = [View(number, 7, (0, 1_000_000), node=0) for number in range(3)]
        for view in views:
            first.begin(view)
            wait_until(lambda number=view.number: second.view is not None and second.view.number == number, LONG_S)
        assert first.views == second.views == views
        first.publish(replace(STATE, members={0: "member", 1: "done"}, broken=2))
        wait_until(lambda: second.states()[0].members == {0: "member", 1: "done"}, LONG_S)
        late = StoreBoard(SignedStore(raw, Seal(KEY, "run")), 60.0, STATE, View)
        stack.callback(late.leave)
        late.begin(View(2, 99, (5,)))
        wait_until(lambda: late.views == views, LONG_S)


def test_a_launcher_whose_processes_are_done_is_not_lost_and_one_that_has_left_is_at_once() -> None:
    with boards(3) as (_, (mine, done, left)):
        wait_until(lambda: mine.states().keys() == {0, 1, 2}, LONG_S)
        mine._silence.limit_s = 0.5
        done.leave(replace(done.states()[1], members={1: "done"}, has_ended=True))
        left.leave()
        wait_until(lambda: mine.states().keys() == {0, 1}, LONG_S)
        time.sleep(1.0)
        assert mine.states().keys() == {0, 1}
        assert mine.has_timed_out(2)
        assert not mine.has_timed_out(0)
