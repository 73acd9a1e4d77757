"""What a process says it is at, and how much of a step was its own work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.cluster.activity import ADDING, COMPUTING, READING, UPDATING, Activity

CPU = torch.device("cpu")


def test_a_wait_inside_of_something_is_told_and_over_when_it_is() -> None:
    pulse = Activity()
    pulse.enter(COMPUTING)
    with pulse.waiting("for the others"):
        assert (pulse.doing, pulse.waits) == ("for the others", True)
    assert (pulse.doing, pulse.waits) == (COMPUTING, False)


def test_everything_that_begins_is_progress() -> None:
    pulse = Activity()
    seen = [pulse.num_beats]
    for doing in (READING, READING, COMPUTING):
        pulse.enter(doing)
        seen.append(pulse.num_beats)
    assert seen == sorted(set(seen))


def test_own_work_is_a_step_s_reading_and_computing_without_waiting_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("lockstep.cluster.activity.time", SimpleNamespace(perf_counter=lambda: now[0]))
    pulse = Activity()
    for step in range(2):
        pulse.begin_step(step, CPU)
        pulse.enter(READING)
        passes(0.5)
        with pulse.waiting("in batch norm"):
            passes(2.0)
        pulse.end_work(num_micro_batches=3)
        assert (pulse.doing, pulse.waits, pulse.step) == (ADDING, True, step)
        passes(4.0)
        pulse.end_wait()
        assert (pulse.doing, pulse.waits) == (UPDATING, False)
        with pulse.waiting("after the step"):
            passes(8.0)
    assert (pulse.num_steps, pulse.num_micro_batches) == (2, 6)
    assert (pulse.work_s, pulse.wait_s) == (2 * 0.5, 2 * (2.0 + 4.0))
