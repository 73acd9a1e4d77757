"""Checkpoints written in the background: their content, which thread waits for which, and where errors are raised."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.config.schema import CheckpointConfig
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.job import Job
from samebits.engine.output.reports import Reports
from samebits.errors import CheckpointError
from samebits.storage import checkpoint
from samebits.storage.checkpoint import load_checkpoint, steps
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256
from tests.in_loop import train_alone
from tests.unit.engine.test_epoch_end import job_of, parts


class Disk:
    """A disk that takes a checkpoint only when it is let to; counts who writes at the same time."""

    def __init__(self, patch: pytest.MonkeyPatch, *, slow_s: float = 0.0) -> None:
        self.may_go, self.began = threading.Event(), threading.Event()
        self.num_writing, self.most_writing = 0, 0
        real = checkpoint.write

        def write(*arguments: Any) -> Path:
            self.num_writing += 1
            self.most_writing = max(self.most_writing, self.num_writing)
            self.began.set()
            if slow_s:
                time.sleep(slow_s)
            else:
                assert self.may_go.wait(100)
            try:
                return real(*arguments)
            finally:
                self.num_writing -= 1

        patch.setattr(checkpoint, "write", write)


def saver_of(job: Job, folder: RunFolder, every: str = "1 steps", keep: int = 9) -> CheckpointManager:
    return CheckpointManager(folder, CheckpointConfig(every=every, keep=keep), job.world)


def advance(job: Job) -> str:
    """A step that changes every weight; the hash of the weights after it."""
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter += 1
    job.progress.step += 1
    return weights_sha256(job.model.state_dict())


def saved_sha256(folder: RunFolder, step: int) -> str:
    return weights_sha256(load_checkpoint(folder.checkpoints / checkpoint.name_of(step)).weights)


def test_a_save_returns_at_once_and_holds_the_weights_of_its_moment(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(parts([]))
    disk, checkpoints = Disk(monkeypatch), saver_of(job, folder)
    expected = advance(job)
    checkpoints.save(job)
    assert disk.began.wait(100)
    assert steps(folder.checkpoints) == []
    assert advance(job) != expected  # training continues
    disk.may_go.set()
    checkpoints.wait()
    assert saved_sha256(folder, 1) == expected


def test_there_is_one_writer_at_a_time_and_the_next_save_waits_for_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(parts([]))
    disk, checkpoints = Disk(monkeypatch, slow_s=0.1), saver_of(job, folder)
    expected = []
    for _ in range(3):
        expected.append(advance(job))
        assert checkpoints.is_due(job)
        checkpoints.save(job)
    checkpoints.wait()
    assert disk.most_writing == 1
    assert [saved_sha256(folder, step) for step in (1, 2, 3)] == expected


def test_a_save_by_the_clock_is_put_off_while_one_is_under_way(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(parts([]))
    disk, checkpoints = Disk(monkeypatch), saver_of(job, folder, every="0.001s")
    advance(job)
    checkpoints.save(job)
    assert disk.began.wait(100)
    time.sleep(0.01)
    assert not checkpoints.is_due(job)
    disk.may_go.set()
    checkpoints.wait()
    assert checkpoints.is_due(job)


def test_the_same_step_again_waits_for_no_thread_and_its_newest_metrics_stay(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(parts([]))
    disk, checkpoints = Disk(monkeypatch), saver_of(job, folder)
    expected = advance(job)
    checkpoints.save(job)
    job.progress.metrics = {"score": 0.5}
    checkpoints.save(job)
    assert steps(folder.checkpoints) == []
    disk.may_go.set()
    checkpoints.wait()
    assert load_checkpoint(folder.checkpoints / "step-000001").state["metrics"] == {"score": 0.5}
    assert saved_sha256(folder, 1) == expected
    assert disk.most_writing == 1


@pytest.mark.parametrize("call", ["is_due", "save", "wait", "last_step"])
def test_what_goes_wrong_beside_training_comes_out_at_the_next_call(small_disk: Path, call: str) -> None:
    folder = RunFolder(small_disk / "run")
    folder.open()
    job = job_of(parts([]))
    checkpoints = saver_of(job, folder)
    advance(job)
    checkpoints.save(job)
    checkpoints.wait()
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
        filler.write(bytes(2**20))
    advance(job)
    checkpoints.save(job)
    checkpoints.close()
    arguments = {"is_due": [job], "save": [job], "wait": [], "last_step": [job.world]}[call]
    with pytest.raises(CheckpointError) as caught:
        getattr(checkpoints, call)(*arguments)
    assert f"can't write {folder.checkpoints / 'step-000002'}: No space left on device" in str(caught.value)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000001"]
    folder.close()


def run(job: Job, folder: RunFolder, checkpoints: CheckpointManager, stop_after: int = -1) -> bool:
    reports = Reports(job, folder)
    try:
        return train_alone(job, checkpoints, reports, lambda: job.progress.step == stop_after)
    finally:
        reports.close()


@pytest.mark.parametrize(("stop_after", "saved"), [(-1, 6), (2, 3)])
def test_the_last_checkpoint_of_a_run_and_of_a_stop_is_whole_before_training_returns(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, stop_after: int, saved: int
) -> None:
    job = job_of(parts([0.1, 0.2, 0.3]))
    Disk(monkeypatch, slow_s=0.2)
    is_complete = run(job, folder, saver_of(job, folder, every="100 steps"), stop_after)
    assert is_complete == (stop_after < 0)
    assert steps(folder.checkpoints)[-1] == saved
    assert saved_sha256(folder, saved) == weights_sha256(job.model.state_dict())
    assert not [thread for thread in threading.enumerate() if thread.name == "background"]


def test_a_last_checkpoint_that_can_not_be_written_is_an_error_of_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(parts([0.1, 0.2, 0.3]))

    def write(*_: Any) -> Path:
        raise CheckpointError("can't write it")

    monkeypatch.setattr(checkpoint, "write", write)
    with pytest.raises(CheckpointError, match="can't write it"):
        run(job, folder, saver_of(job, folder, every="6 steps"))


def test_a_run_goes_back_to_a_checkpoint_that_is_still_being_written(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    straight = job_of(parts([0.1]), epochs=1)
    other = RunFolder(tmp_path / "straight")
    other.open()
    run(straight, other, saver_of(straight, other))
    other.close()

    torch.manual_seed(1)
    job = job_of(parts([0.1]), epochs=1, watch={"nonfinite": "rollback"})
    real, num_calls = job.parts.loss, 0

    def loss(outputs: Any, batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1  # the first step has two micro-batches; each of the second one's is run again to explain it
        terms = real(outputs, batch)
        return {name: term * float("nan") for name, term in terms.items()} if num_calls == 3 else terms

    object.__setattr__(job.parts, "loss", loss)
    Disk(monkeypatch, slow_s=0.3)
    assert run(job, folder, saver_of(job, folder))
    assert weights_sha256(job.model.state_dict()) == weights_sha256(straight.model.state_dict())
    assert job.progress.skipped == []


def test_an_evaluation_is_left_when_a_stop_is_asked_for_and_the_epoch_is_kept(folder: RunFolder) -> None:
    job = job_of(parts([0.1, 0.2, 0.3]), eval_batch=2)
    checkpoints, reports, asked = saver_of(job, folder, every="100 steps"), Reports(job, folder), iter([False, True])
    try:
        assert not train_alone(job, checkpoints, reports, lambda: False, lambda: next(asked))
    finally:
        reports.close()
    assert steps(folder.checkpoints) == [2]
    assert not load_checkpoint(folder.checkpoints / "step-000002").state["metrics"]
    again = job_of(parts([0.1, 0.2, 0.3]), eval_batch=2)
    checkpoints = saver_of(again, folder)
    checkpoints.restore(again, "auto", print)
    assert run(again, folder, checkpoints)
    assert again.progress.metrics["score"] == 0.3
