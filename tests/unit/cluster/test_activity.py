"""What processes leave for the launcher to read and read from it: their activity, and the members of a world."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samebits.cluster.activity import COMPUTING, READING, REDUCING, UPDATING, Activity
from samebits.cluster.views.membership import LATE_S, Membership, RunEnded, View, broken_mark, mark_path, write_view

CPU = torch.device("cpu")


def test_a_wait_inside_an_activity_is_shown_until_it_ends() -> None:
    activity = Activity()
    activity.enter(COMPUTING)
    with activity.waiting("for the others"):
        assert (activity.doing, activity.waits) == ("for the others", True)
    assert (activity.doing, activity.waits) == (COMPUTING, False)


def test_entering_an_activity_is_progress() -> None:
    activity = Activity()
    seen = [activity.num_beats]
    for doing in (READING, READING, COMPUTING):
        activity.enter(doing)
        seen.append(activity.num_beats)
    assert seen == sorted(set(seen))


def test_own_work_is_a_step_s_reading_and_computing_without_waiting_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("samebits.cluster.activity.time", SimpleNamespace(perf_counter=lambda: now[0]))
    activity = Activity()
    for step in range(2):
        activity.begin_step(step, CPU)
        activity.enter(READING)
        passes(0.5)
        with activity.waiting("in batch norm"):
            passes(2.0)
        activity.end_work(num_micro_batches=3)
        assert (activity.doing, activity.waits, activity.step) == (REDUCING, True, step)
        passes(4.0)
        activity.end_wait()
        assert (activity.doing, activity.waits) == (UPDATING, False)
        with activity.waiting("after the step"):
            passes(8.0)
    assert (activity.num_steps, activity.num_micro_batches) == (2, 6)
    assert (activity.work_s, activity.wait_s) == (2 * 0.5, 2 * (2.0 + 4.0))


def membership(path: Path, worker: int, *views: View) -> Membership:
    write_view(path, views[0])
    found = Membership(path, worker)
    found.present = views[0]
    write_view(path, views[-1])
    return found


def test_the_next_view_of_a_worker_is_one_that_names_it(tmp_path: Path) -> None:
    before, after = View(0, 1, (0, 1)), View(2, 3, (1, 4), urgent=2)
    assert membership(tmp_path / "views", 1, before, after).wait_for_next(60.0) == after
    with pytest.raises(TimeoutError):
        membership(tmp_path / "views", 0, before, after).wait_for_next(0.01)


def test_a_wait_for_others_ends_once_one_of_them_has_completed_the_run(tmp_path: Path) -> None:
    before, after = View(0, 1, (0, 1)), View(0, 1, (0, 1), is_last=True)
    found = membership(tmp_path / "views", 1, before, after)
    with pytest.raises(RunEnded):
        found.wait_for_next(60.0)
    assert found.has_ended(before)


def test_a_view_that_is_being_replaced_stays_the_newest_known(tmp_path: Path) -> None:
    found = membership(tmp_path / "views", 1, before := View(0, 1, (0, 1)))
    (tmp_path / "views").write_text("{", encoding="utf-8")
    assert found.read() == before
    (tmp_path / "views").unlink()
    assert found.read() == before


@pytest.mark.parametrize(
    ("view", "is_reported"),
    [
        (View(3, 1, (0, 1), urgent=3), True),
        (View(3, 1, (0, 1), urgent=2), False),  # a new process joins: a member may have a validation to finish
        (View(0, 1, (0, 1), urgent=0), False),  # the run starts, and its processes do not start at the same time
    ],
)
def test_members_that_are_late_after_a_loss_are_reported(tmp_path: Path, view: View, is_reported: bool) -> None:
    found = membership(tmp_path / "views", 1, view)
    path = mark_path(tmp_path, broken_mark(view), 1)
    found.note_wait(view, LATE_S / 2)
    assert not path.exists()
    found.note_wait(view, LATE_S * 2)
    assert path.exists() == is_reported
