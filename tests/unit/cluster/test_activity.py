"""The activity of a process, and how much of a step was its own work."""

from types import SimpleNamespace

import pytest
import torch

from samebits.cluster.activity import COMPUTING, READING, REDUCING, UPDATING, Activity

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
