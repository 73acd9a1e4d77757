"""A few seconds of the trace of `benchmarks/spot.py`: a machine is lost, and returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.spot import num_steps, replay
from benchmarks.spot_tools import SAMPLE_S, Lockstep
from benchmarks.spot_trace import Change, goodput
from tests.runs import processes_with, wait_until


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_lost_and_returned_machine_leaves_the_weights_and_repeats_no_step(tmp_path: Path) -> None:
    seconds, size = 9.0, 3
    trace = [*(Change(0.0, slot, True) for slot in range(size)), Change(2.0, 1, False), Change(4.0, 1, True)]
    job = Lockstep(tmp_path / "job", num_steps(seconds, size))
    done = replay(job, trace, seconds)
    assert done.weights == job.alone()
    assert done.repeated == 0
    assert job.recorded() == [*range(1, num_steps(seconds, size) + 1)]
    # The time that the samples sleep bounds the rate, however busy the machine is.
    assert 0.0 < goodput(done.samples, trace, seconds, lambda up: up / SAMPLE_S) <= 1.0
    wait_until(lambda: not processes_with(str(tmp_path)))
