"""The header and the closing block of a run, in 80 columns."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from samebits.cluster.world import alone
from samebits.config.schema import RunConfig
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch
from samebits.engine.build import make_job
from samebits.engine.job import Job
from samebits.engine.output.reports import Reports
from samebits.engine.output.summary import finish, head
from samebits.engine.parts import Parts
from samebits.engine.run_spec import RunSpec
from samebits.metrics.classification import Accuracy
from samebits.report.format import block
from samebits.storage.run_folder import RunFolder

NUM_SAMPLES = 64


class Samples:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        return Batch(torch.zeros(len(indices), 4), torch.zeros(len(indices)), torch.from_numpy(indices))


def loss(outputs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
    return {"loss": outputs.mean()}


def build() -> Parts:
    return Parts(model=nn.Linear(4, 2), loss=loss, train_data=Samples, eval_data=Samples, metric=lambda: Accuracy(2))


def job_of(num_procs: int, **settings: object) -> tuple[RunSpec, Job]:
    config = RunConfig(recipe="test", device="cpu", **settings)  # type: ignore[arg-type]  # pydantic looks at them
    job = make_job(config, build, alone("cpu"))
    job.world = replace(job.world, size=num_procs)
    request = RunSpec("test", config, {}, Path("run"), resume="never", is_restart=False, started_at=0.0)
    return request, job


def test_the_header_names_the_micro_batch_that_gives_all_processes_work() -> None:
    _, rows = head(*job_of(8, global_batch=48, micro_batch=12), {})
    assert rows["idle"].splitlines() == [
        "4 of 8 processes are idle: a step has 4 micro-batches",
        "micro_batch=6 gives all of them work (and changes the result)",
    ]
    assert "idle" not in head(*job_of(8, global_batch=48, micro_batch=6), {})[1]


def test_the_head_counts_with_a_dataset_that_is_smaller_than_a_batch() -> None:
    _, rows = head(*job_of(4, global_batch=128, micro_batch=32), {})
    assert rows["idle"].splitlines()[1].startswith("micro_batch=21 ")  # 64 samples


@pytest.mark.parametrize("name", ["other shape", "sums"])
def test_the_head_is_80_columns_wide(name: str) -> None:
    shapes = [f"stages.{place}.blocks.0.convolution.weight (64, 64, 3, 3) in the file, (5, 4) here" for place in (1, 2)]
    title, rows = head(*job_of(8, global_batch=48, micro_batch=12), {name: "\n".join(shapes)})
    lines = block(title, rows).splitlines()
    assert 70 < max(map(len, lines)) <= 80
    assert " ".join(rows[name].split()) == " ".join(shapes)
    assert " ".join(shapes) in " ".join(" ".join(lines).split())


def finished(request: RunSpec, job: Job, folder: RunFolder) -> None:
    reports = Reports(job, folder)
    finish(request, job, folder, reports, [(1.0, 2.0), (2.0, 1.0)])
    reports.close()


@pytest.mark.parametrize(("resume", "is_restart"), [("auto", False), ("auto", True), ("never", False)])
def test_the_time_of_a_resumed_run_is_that_since_the_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resume: str, is_restart: bool
) -> None:
    request, job = job_of(2)
    job.progress.metrics, job.resumed_from = {"top1": 1 / 3}, job.fingerprint
    finished(replace(request, resume=resume, is_restart=is_restart), job, RunFolder(tmp_path))
    assert (" since the resume: " in capsys.readouterr().out) is (resume == "auto" and not is_restart)


def test_the_end_is_80_columns_wide_but_for_what_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request, job = job_of(2, global_batch=32, micro_batch=8)
    folder = RunFolder(tmp_path / ("long_" * 20))
    folder.path.mkdir()
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "steps.bin"):
        (folder.path / name).touch()  # a run whose files are gone is named first
    job.progress.metrics = {"top1": 1 / 3}
    finished(request, job, folder)
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("top-1 33.33% (64 samples, each once)")
    assert told[1] == "  all-reduce  33.3% of step time in communication that the backward pass did not"
    assert told[2] == "              hide, 16.7% waiting for slower processes"
    assert f"  next        samebits eval {folder.path}" in told
    assert json.loads((folder.path / "result.json").read_text())["metrics"] == {"top1": 1 / 3}
