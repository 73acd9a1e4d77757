"""A few seconds of the trace of `benchmarks/spot.py`: a machine is lost, and returns."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.spot import replay
from benchmarks.spot_tools import LIMIT_S, SAMPLE_S, Samebits
from benchmarks.spot_trace import Change, goodput
from tests.runs import processes_with, result, wait_until

NUM_STEPS = 500  # more than a busy machine lets pass until the returned machine has joined


class Job(Samebits):
    """Loses a machine only when all compute, and completes the run only when the returned one computes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NUM_STEPS)
        self.folder = folder

    def change(self, up: set[int], changes: Sequence[Change]) -> None:
        if not all(change.is_up for change in changes):
            wait_until(lambda: any("3 processes" in text for text in self.outputs()), LIMIT_S)
        super().change(up, changes)

    def finish(self) -> str:
        lost, whole = "continuing with 2 processes", "continuing with 3 processes"
        wait_until(lambda: any(lost in text and whole in text.split(lost)[-1] for text in self.outputs()), LIMIT_S)
        return super().finish()

    def outputs(self) -> list[str]:
        return [path.read_text() for path in self.folder.glob("said-*")]


@pytest.mark.lab
def test_a_lost_and_returned_machine_leaves_the_weights_and_repeats_no_step(tmp_path: Path) -> None:
    seconds = 9.0
    trace = [*(Change(0.0, slot, True) for slot in range(3)), Change(2.0, 1, False), Change(4.0, 1, True)]
    job = Job(tmp_path / "job")
    done = replay(job, trace, seconds)
    assert done.weights == job.alone()
    assert done.repeated == 0
    assert job.recorded() == [*range(1, NUM_STEPS + 1)]
    sizes = [world["size"] for world in result(tmp_path / "job" / "run")["worlds"]]
    # On a busy machine the run may begin with fewer launchers, and the others join before the loss. There, one that
    # does not answer in time counts as lost, too, and returns.
    first = sizes.index(3)
    assert sizes[:first] in ([], [1], [2], [1, 2])
    assert sizes[first + 1] == 2
    assert sizes[-1] == 3
    # The time that the samples sleep bounds the rate, however busy the machine is.
    assert 0.0 < goodput(done.samples, trace, seconds, lambda up: up / SAMPLE_S) <= 1.0
    wait_until(lambda: not processes_with(str(tmp_path)))
