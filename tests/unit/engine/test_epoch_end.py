"""The end of an epoch: saved before it is evaluated, compared by the metric that the recipe monitors."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samebits.cluster.world import alone
from samebits.config.schema import CheckpointConfig, OptimConfig, RunConfig
from samebits.data.samples import Batch, DatasetSamples
from samebits.engine.build import make_job
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.job import Job
from samebits.engine.output.reports import Reports
from samebits.engine.parts import Parts
from samebits.errors import ConfigError
from samebits.report.records import read_records
from samebits.storage.checkpoint import steps
from samebits.storage.run_folder import RunFolder
from tests.in_loop import train_alone

STEPS_PER_EPOCH = 2


class Judged:
    """A metric that gives the next of some values at each evaluation."""

    def __init__(self, values: Iterator[float]) -> None:
        self.values, self.num_samples = values, 0

    def add(self, outputs: Any, batch: Batch) -> None:
        self.num_samples += len(batch)

    def state(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples}

    def merge(self, state: dict[str, Any]) -> None:
        self.num_samples += state["num_samples"]

    def result(self) -> dict[str, float]:
        return {"score": next(self.values)}


def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"cross_entropy": nn.functional.cross_entropy(outputs, batch.targets)}


def parts(values: list[float], **more: Any) -> Parts:
    samples = DatasetSamples([(torch.tensor([float(index), 1.0]), index % 2) for index in range(7)])
    given = iter(values)
    made = Parts(model=nn.Linear(2, 2), loss=loss, train_data=lambda: samples, eval_data=lambda: samples,
                 metric=lambda: Judged(given), monitor=("score", "max"))  # fmt: skip
    return replace(made, **more)


def job_of(made: Parts, epochs: int = 3, **more: Any) -> Job:
    config = RunConfig(
        recipe="test", epochs=epochs, global_batch=4, micro_batch=2, device="cpu", optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(every="1 epoch", keep=1), **more,
    )  # fmt: skip
    return make_job(config, lambda: made, alone("cpu"))


def go(job: Job, folder: RunFolder, has_stop: Callable[[], bool] = lambda: False) -> Reports:
    checkpoints = CheckpointManager(folder, job.config.checkpoint, job.world)
    checkpoints.restore(job, "auto", print)
    reports = Reports(job, folder)
    try:
        train_alone(job, checkpoints, reports, has_stop)
    finally:
        reports.close()
    return reports


def best(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder.checkpoints / "best.json").read_text())
    return found


def test_an_epoch_is_saved_before_it_is_evaluated(folder: RunFolder) -> None:
    class Broken(Judged):
        def add(self, outputs: Any, batch: Batch) -> None:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        go(job_of(parts([], metric=lambda: Broken(iter([])))), folder)
    assert steps(folder.checkpoints) == [STEPS_PER_EPOCH]
    # It is evaluated after the resume, and only once.
    job = job_of(parts([0.1, 0.2, 0.3]))
    go(job, folder)
    assert job.progress.step == 3 * STEPS_PER_EPOCH
    assert [record["score"] for record in read_records(folder.path, "eval")] == [0.1, 0.2, 0.3]
    assert job.progress.num_samples == 3 * 7


def test_what_an_evaluation_gave_is_saved_too(folder: RunFolder) -> None:
    go(job_of(parts([0.5]), epochs=1), folder)
    again = job_of(parts([]), epochs=1)
    go(again, folder)  # there is no second value: nothing is evaluated again
    assert again.progress.metrics["score"] == 0.5


def test_an_evaluation_whose_checkpoint_was_not_written_stands_in_the_records_once(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    real = CheckpointManager.save

    def save(checkpoints: CheckpointManager, job: Job) -> None:
        if job.is_evaluated():
            raise Killed
        real(checkpoints, job)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save", save)
        with pytest.raises(Killed):
            go(job_of(parts([0.1]), epochs=1), folder)
    assert len(read_records(folder.path, "eval")) == 1
    go(job_of(parts([0.2]), epochs=1), folder)
    assert [record["score"] for record in read_records(folder.path, "eval")] == [0.2]


def test_a_metric_that_does_not_exist_is_named_with_those_that_do_and_the_epoch_is_kept(folder: RunFolder) -> None:
    with pytest.raises(ConfigError) as caught:
        go(job_of(parts([0.5], monitor=("accuracy", "max"))), folder)
    assert "no metric accuracy" in str(caught.value)
    assert caught.value.slots["allowed"] == "loss, score"
    assert steps(folder.checkpoints) == [STEPS_PER_EPOCH]


def test_best_is_max_or_min() -> None:
    with pytest.raises(ConfigError, match="the mode of the monitored metric is 'higher'"):
        parts([], monitor=("score", "higher"))


@pytest.mark.parametrize(
    ("better", "values", "expected"),
    [("max", [0.1, 0.3, 0.2], 1), ("min", [0.3, 0.2, 0.1], 2), ("max", [math.nan, 0.1, math.nan], 1)],
)
def test_the_best_epoch_stays(folder: RunFolder, better: str, values: list[float], expected: int) -> None:
    go(job_of(parts(values, monitor=("score", better))), folder)
    step = STEPS_PER_EPOCH * (expected + 1)
    assert best(folder) == {"step": step, "metric": "score", "value": values[expected], "better": better}
    assert steps(folder.checkpoints) == sorted({step, 3 * STEPS_PER_EPOCH})


def test_a_mark_that_a_killed_process_did_not_set_is_set_by_the_next(folder: RunFolder) -> None:
    go(job_of(parts([0.1, 0.3, 0.2])), folder)
    expected = best(folder)
    (folder.checkpoints / "best.json").unlink()
    go(job_of(parts([])), folder)
    assert best(folder) == expected


def test_modules_that_a_recipe_froze_stay_in_evaluation_mode(folder: RunFolder) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 2))
    seen = []
    model[0].register_forward_hook(lambda module, *_: seen.append((model.training, module.training)))
    go(job_of(parts([0.1, 0.2], model=model), epochs=2), folder)
    assert set(seen) == {(True, False), (False, False)}
    assert model[0].running_mean.tolist() == [0, 0]


def test_samples_of_skipped_steps_are_not_counted(folder: RunFolder) -> None:
    samples = DatasetSamples([(torch.tensor([math.nan if index == 3 else 1.0, 1.0]), 0) for index in range(7)])
    job = job_of(parts([0.1], train_data=lambda: samples), epochs=1, watch={"nonfinite": "skip"})
    go(job, folder)
    (skipped,) = job.progress.skipped
    assert job.progress.num_samples == 7 - (4 if skipped == 0 else 3)


def test_pictures_that_can_not_be_drawn_do_not_end_the_run(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(*_: Any) -> None:
        raise OSError("no font")

    go(job_of(parts([0.1], draw=draw), epochs=1), folder)
    assert "pictures could not be drawn: OSError: no font" in capsys.readouterr().out
    assert best(folder)["value"] == 0.1


@pytest.mark.parametrize(("eval_every", "epochs", "expected"), [(2, 5, [4, 8, 10]), (3, 3, [6]), (9, 2, [4])])
def test_evaluates_every_few_epochs_and_at_the_end(
    folder: RunFolder, eval_every: int, epochs: int, expected: list[int]
) -> None:
    job = job_of(parts([0.3, 0.2, 0.1]), epochs=epochs, eval_every=eval_every)
    go(job, folder)
    assert [record["step"] for record in read_records(folder.path, "eval")] == expected
    assert job.progress.best == {"step": expected[0], "metric": "score", "value": 0.3, "better": "max"}
    assert steps(folder.checkpoints) == sorted({expected[0], 2 * epochs})


def test_a_new_rank_0_records_the_last_step_if_the_former_one_has_not(folder: RunFolder) -> None:
    job = job_of(parts([0.5]), epochs=1)
    go(job, folder)
    whole = read_records(folder.path, "train")
    path = folder.path / "metrics.jsonl"
    for num_kept, cut in ((1, ""), (1, '{"kind": "train", "st'), (2, "")):
        path.write_text("".join(json.dumps(record) + "\n" for record in whole[:num_kept]) + cut)
        reports = Reports(job, folder)  # as its process does once the step has been applied
        reports.start(job)
        reports.close()
        found = read_records(folder.path, "train")
        assert [record["step"] for record in found] == [1, 2]
        assert [(record["loss"], record["grad_norm"]) for record in found] == [
            (record["loss"], record["grad_norm"]) for record in whole
        ]
