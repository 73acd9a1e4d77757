"""The launchers of several machines, each with a process that trains nothing: who goes, who comes, who leads."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from samebits.cluster.env import MEMBER, VIEWS
from samebits.cluster.views.membership import Membership, View, broken_mark, mark_path
from samebits.launch.crew.crew import Entry
from samebits.launch.crew.recovering_crew import RecoveringCrew
from samebits.launch.supervisor import Supervisor
from samebits.process_range import ProcessRange, RendezvousConfig
from tests.runs import wait_until
from tests.unit.launch.meeting import Meeting, a_store

pytestmark = pytest.mark.full


def train_nothing(folder: Path, name: str) -> int:
    """Take part in the views until the run ends; a replacement is ready once there is the file ready-NAME."""
    membership = Membership(Path(os.environ[VIEWS]), int(os.environ[MEMBER]))
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    is_member = False
    while not (folder / "end").exists() and not stops and not membership.read().is_last:
        if membership.is_member or (folder / f"ready-{name}").exists():
            membership.mark("ready")
        if membership.is_member and not is_member:
            is_member = True
            membership.mark("member")
        time.sleep(0.005)
    return 0


class Launcher(threading.Thread):
    """One launcher, whose machine can be lost."""

    def __init__(self, folder: Path, store: TCPStore, name: str, nodes: RendezvousConfig, serves: bool) -> None:
        super().__init__(daemon=True)
        (folder / name).mkdir()
        self.reported: list[str] = []
        self.supervisor = Supervisor(folder / name, 10.0, None, lambda: "stopping")
        self.supervisor.report = self.reported.append  # type: ignore[method-assign,assignment]
        entry = Entry(train_nothing, (folder, name), folder / name, 0.0, "")
        self.crew = RecoveringCrew(entry, self.supervisor, 1, 1, 9, Meeting(nodes, store, serves))
        self.outcome = ""
        self.start()

    def run(self) -> None:
        code, outcome = 1, ""
        try:
            code = int(self.crew.run()[0])
            outcome = "failed" if code else "done"
        except Exception as error:
            outcome = str(error)
        self.crew.end(code, outcome)
        self.outcome = outcome

    @property
    def view(self) -> View:
        return self.crew._view

    @property
    def states(self) -> set[str]:
        return {*self.crew._status().members.values()}

    def stop(self, signum: int) -> None:
        self.supervisor.stop, self.supervisor._stop_since = signal.Signals(signum), time.monotonic()

    def lose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Write no state any more, and lose the process, as when the machine loses its power."""
        monkeypatch.setattr(self.crew._board, "_exchange", lambda beat: None)
        for name in ("_lead", "_check_board"):
            monkeypatch.setattr(self.crew, name, lambda: None)
        monkeypatch.setattr(self.crew, "end", lambda code, text: None)
        monkeypatch.setattr(self.crew, "_supervise", lambda: True)
        for pid in self.crew.pids():
            os.kill(pid, signal.SIGKILL)


class Run:
    """The launchers of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launchers = folder, list[Launcher]()
        self.store = a_store()

    def begin(
        self,
        size: ProcessRange,
        join_s: float = 60.0,
        last_call_s: float = 0.0,
        timeout_s: float = 20.0,
        serves: bool = False,
    ) -> Launcher:
        nodes = RendezvousConfig(size, "127.0.0.1:29500", "run", join_s, last_call_s, timeout_s, self.folder)
        self.launchers.append(Launcher(self.folder, self.store, "abcd"[len(self.launchers)], nodes, serves))
        return self.launchers[-1]

    def end(self) -> None:
        (self.folder / "end").touch()
        for launcher in self.launchers:
            if launcher.is_alive():
                launcher.stop(signal.SIGINT)
        for launcher in self.launchers:
            launcher.join(30.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.end()


UP_TO_3 = ProcessRange(1, 3)
LOST_S = 4.0  # where a machine is to be lost; elsewhere, the limit is one that no busy machine reaches


def test_ctrl_c_before_a_machine_has_joined_keeps_no_other_one_out(run: Run) -> None:
    first = run.begin(UP_TO_3)
    wait_until(lambda: first.states == {"member"}, 60)
    second = run.begin(UP_TO_3)
    wait_until(lambda: second.states == {"started"}, 60)
    second.stop(signal.SIGINT)
    second.join(30)
    assert second.outcome == "done"
    assert not any("could not join" in text for text in second.reported)
    (run.folder / "ready-c").touch()
    third = run.begin(UP_TO_3)
    wait_until(lambda: third.states == {"member"}, 60)
    wait_until(lambda: len(first.view.members) == 2, 60)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_first_machine_may_go_before_the_run_begins(run: Run, signum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (run.begin(UP_TO_3, last_call_s=8.0, timeout_s=LOST_S) for _ in range(2))
    wait_until(lambda: len(first.crew._states) == len(second.crew._states) == 2, 60)
    if signum == signal.SIGKILL:
        first.lose(monkeypatch)
    else:
        first.stop(signum)
    wait_until(lambda: second.states == {"member"}, 60)
    assert second.view.members == (1_000_000,)


def test_a_machine_that_goes_before_the_run_begins_is_no_member(run: Run) -> None:
    size = ProcessRange(3, 3)
    first, second = run.begin(size), run.begin(size)
    wait_until(lambda: len(first.crew._states) == 2, 60)
    second.stop(signal.SIGINT)
    second.join(30)
    third = run.begin(size)
    wait_until(lambda: {0, 2} == first.crew._states.keys(), 60)
    assert first.view.number < 0, "two of three have joined"
    fourth = run.begin(size)
    wait_until(lambda: all(each.states == {"member"} for each in (first, third, fourth)), 60)
    assert first.view.members == (0, 2_000_000, 3_000_000)


def test_too_few_machines_end_with_an_error_though_the_first_one_is_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (run.begin(ProcessRange(2, 3), join_s=4.0, last_call_s=60.0, timeout_s=LOST_S) for _ in range(2))
    wait_until(lambda: len(first.crew._states) == len(second.crew._states) == 2, 60)
    first.lose(monkeypatch)
    second.join(60)
    assert "gave up waiting for 2 nodes" in second.outcome


def test_the_loss_of_the_only_member_ends_the_run_of_a_machine_that_has_not_joined_yet(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.begin(UP_TO_3, timeout_s=LOST_S)
    wait_until(lambda: first.states == {"member"}, 60)
    second = run.begin(UP_TO_3, timeout_s=LOST_S)
    wait_until(lambda: second.states == {"started"}, 60)
    first.lose(monkeypatch)
    second.join(60)
    assert "0 of 1:3 nodes remain" in second.outcome
    assert "--resume auto" in second.outcome


def test_a_machine_that_the_run_cannot_do_without_may_be_silent_as_long_as_any(run: Run) -> None:
    size = ProcessRange(2, 2)
    first, second = (run.begin(size, timeout_s=10.0) for _ in range(2))
    wait_until(lambda: first.states == second.states == {"member"}, 60)
    exchange, is_over = second.crew._board._exchange, threading.Event()

    def exchange_late(beat: int) -> None:
        is_over.wait(60.0)
        exchange(beat)

    second.crew._board._exchange = exchange_late  # type: ignore[method-assign]
    mark_path(run.folder / "a", broken_mark(first.view), 0).touch()  # where it could, the run would go on without it
    wait_until(lambda: first.crew._states.keys() == {0}, 60)
    time.sleep(0.2)
    is_over.set()
    wait_until(lambda: first.crew._states.keys() == {0, 1}, 60)
    os.kill(second.crew.pids()[0], signal.SIGKILL)
    (run.folder / "ready-b").touch()
    wait_until(lambda: first.view.members == (0, 1_000_001), 60)
    assert not first.outcome + second.outcome


def test_a_replacement_that_was_dropped_while_its_launcher_did_not_look_is_replaced(run: Run) -> None:
    first = run.begin(UP_TO_3, timeout_s=LOST_S)
    wait_until(lambda: first.states == {"member"}, 60)
    second = run.begin(UP_TO_3, timeout_s=LOST_S)
    wait_until(lambda: second.states == {"started"}, 60)
    pause, paused = threading.Event(), threading.Event()
    board = second.crew._board
    exchange = board._exchange

    def exchange_and_pause(beat: int) -> None:
        is_ready = "ready" in board._mine.members.values()
        exchange(beat)
        if is_ready and not pause.is_set():
            paused.set()
            pause.wait(60.0)

    board._exchange = exchange_and_pause  # type: ignore[method-assign]
    (run.folder / "ready-b").touch()
    wait_until(paused.is_set, 60)
    wait_until(lambda: first.view.number == 2, 60)  # with it, and without it again
    dropped = first.crew._board.views[1].members[1]
    pause.set()
    wait_until(lambda: len(first.view.members) == 2, 60)
    assert first.view.members[1] != dropped


def test_the_launcher_that_serves_the_store_does_not_leave_and_the_run_stops(run: Run) -> None:
    first = run.begin(UP_TO_3, serves=True)
    wait_until(lambda: first.states == {"member"}, 60)
    (run.folder / "ready-b").touch()
    second = run.begin(UP_TO_3)
    wait_until(lambda: first.states == second.states == {"member"}, 60)
    first.stop(signal.SIGTERM)
    wait_until(lambda: "the others meet at this machine: the run stops" in first.reported, 60)
    second.join(60)
    first.join(60)
    assert second.outcome == first.outcome == "done"
    assert not any("left the run" in text for text in first.reported)


def test_the_launcher_that_serves_the_store_waits_until_the_others_have_saved(run: Run) -> None:
    size = ProcessRange(2, 2)
    first, second = run.begin(size, serves=True), run.begin(size)
    wait_until(lambda: first.states == second.states == {"member"}, 60)
    second.crew._supervise = lambda: True  # type: ignore[method-assign]  # its process is still at work
    (run.folder / "end").touch()
    wait_until(lambda: 0 in second.crew._states and second.crew._states[0].has_ended, 60)
    assert second.view.is_last
    first.join(0.5)
    assert first.is_alive()
    del second.crew._supervise
    for launcher in (second, first):
        launcher.join(60)
        assert launcher.outcome == "done"


@pytest.mark.parametrize("is_joining", [False, True])
def test_the_loss_of_the_store_ends_the_run_with_the_way_to_resume(run: Run, is_joining: bool) -> None:
    run.store = a_store(timeout_s=1.0)
    first = run.begin(UP_TO_3)
    wait_until(lambda: first.states == {"member"}, 60)
    last = first
    if is_joining:
        last = run.begin(UP_TO_3)
        wait_until(lambda: last.states == {"started"}, 60)
    run.store = None  # type: ignore[assignment]  # closes it
    for launcher in (first, last):
        launcher.join(60)
        assert "has lost the rendezvous at 127.0.0.1:29500" in launcher.outcome
        assert "--resume auto" in launcher.outcome
    wait_until(lambda: not any(thread.name == "board" for thread in threading.enumerate()), 60)


def test_a_failure_ends_the_run_on_all_machines_with_its_text(run: Run) -> None:
    size = ProcessRange(2, 2)
    first, second = run.begin(size), run.begin(size)
    wait_until(lambda: first.states == second.states == {"member"}, 60)
    first.crew._supervise = lambda: False  # type: ignore[method-assign]
    first.join(60)
    second.join(60)
    assert (first.outcome, second.outcome) == ("failed", "failed")
