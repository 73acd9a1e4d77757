"""Pictures of a run, which change no bit and cannot end it, and its share of time waiting for data."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from samebits.cluster.world import alone
from samebits.config.schema import CheckpointConfig, OptimConfig, RunConfig
from samebits.data.samples import Batch, DatasetSamples
from samebits.engine.build import make_job
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.job import Job
from samebits.engine.output.reports import NUM_SAMPLES, Reports
from samebits.engine.parts import Parts
from samebits.metrics.classification import Accuracy
from samebits.report import speed
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256
from tests.in_loop import train_alone
from tests.ranks.recipe_in_ranks import carry_out
from tests.runs import records, result

Drawn = list[tuple[list[Batch], Path]]


def job_of(draw_samples: Callable[[Sequence[Batch], Path], None] | None, epochs: int = 2) -> Job:
    samples = DatasetSamples([(torch.tensor([float(index), 1.0]), index % 2) for index in range(40)])
    torch.manual_seed(0)
    parts = Parts(
        model=nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 2)),
        loss=lambda outputs, batch: {"loss": nn.functional.cross_entropy(outputs, batch.targets)},
        train_data=lambda: samples,
        eval_data=lambda: samples,
        metric=lambda: Accuracy(2),
        draw_samples=draw_samples,
    )
    config = RunConfig(
        recipe="test", epochs=epochs, global_batch=8, micro_batch=4, device="cpu", optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(every="1 epoch", keep=1),
    )  # fmt: skip
    return make_job(config, lambda: parts, alone("cpu"))


def run(job: Job, folder: RunFolder, has_stop: Callable[[], bool] = lambda: False) -> str:
    checkpoints, reports = CheckpointManager(folder, job.config.checkpoint, job.world), Reports(job, folder)
    checkpoints.restore(job, "auto", print)
    reports.settings = {"optim.lr": 0.01, "loader.num_workers": "auto"}
    try:
        train_alone(job, checkpoints, reports, has_stop)
    finally:
        reports.close()
    return weights_sha256(job.final_weights())


def test_the_first_training_samples_are_drawn_once_and_change_no_bit(folder: RunFolder, tmp_path: Path) -> None:
    drawn: Drawn = []

    def draw(batches: Sequence[Batch], path: Path) -> None:
        drawn.append((list(batches), path))

    job = job_of(draw)
    first = np.concatenate(
        [micro.indices for step in job.order.steps(job.world, stop=4) for micro in step.micro_batches]
    )[:NUM_SAMPLES]
    with_sheet = run(job, folder)
    ((batches, path),) = drawn
    assert path == folder.pictures / "train_samples.png"
    assert np.concatenate([batch.indices.numpy() for batch in batches]).tolist() == first.tolist()
    assert torch.cat([batch.inputs for batch in batches])[:, 0].tolist() == first.tolist()

    other = RunFolder(tmp_path / "other")
    other.open()
    assert run(job_of(None), other) == with_sheet
    other.close()


def test_a_resumed_run_keeps_the_samples_of_its_start(folder: RunFolder) -> None:
    drawn: Drawn = []
    asked = iter([False, False, False, True])
    run(job_of(lambda batches, path: drawn.append((list(batches), path))), folder, lambda: next(asked))
    run(job_of(lambda batches, path: drawn.append((list(batches), path))), folder)
    assert len(drawn) == 1


def test_samples_that_can_not_be_drawn_are_logged_and_the_run_continues(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    def draw(batches: Sequence[Batch], path: Path) -> None:
        raise ValueError("no such font")

    job = job_of(draw)
    run(job, folder)
    assert job.progress.step == job.num_steps
    assert "the training samples could not be drawn" in caplog.text


def test_loss_curves_are_drawn_and_the_metric_s_from_the_second_evaluation_on(
    folder: RunFolder, tmp_path: Path
) -> None:
    short = RunFolder(tmp_path / "short")
    short.open()
    run(job_of(None, epochs=1), short)
    short.close()
    assert [path.name for path in short.pictures.iterdir()] == ["loss.svg"]

    run(job_of(None, epochs=2), folder)
    assert sorted(path.name for path in folder.pictures.iterdir()) == ["loss.svg", "metric.svg"]
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")


@pytest.mark.full
def test_a_run_reports_its_share_of_time_waiting_for_data_and_the_bottleneck(tmp_path: Path) -> None:
    with patch.object(speed, "LOADING_WINDOW_S", 0.2):
        answer = carry_out(alone("cpu"), tmp_path / "run", "never", {"read_s": 0.12})
    assert answer["said"].count("data loading is the bottleneck: ") == 1
    rows = [record["data_wait"] for record in records(tmp_path / "run", "train")]
    assert len(rows) == 4
    assert all(0.2 < share <= 1 for share in rows)
    seconds = result(tmp_path / "run")["seconds"]
    assert 16 * 0.12 <= seconds["data_wait"] <= seconds["training"]
    (line,) = [line for line in answer["said"].splitlines() if "of training time waiting for data" in line]
    assert float(line.split()[1].rstrip("%")) == pytest.approx(
        100 * seconds["data_wait"] / seconds["training"], abs=0.1
    )


def test_a_run_that_does_not_wait_for_data_reports_its_share_too(tmp_path: Path) -> None:
    answer = carry_out(alone("cpu"), tmp_path / "run", "never", {})
    assert "bottleneck" not in answer["said"]
    assert "of training time waiting for data" in answer["said"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["seconds"]["data_wait"] >= 0
