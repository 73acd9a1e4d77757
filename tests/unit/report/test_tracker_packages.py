"""What W&B and MLflow stored, read back through their own packages."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.report.tracked_runs import SHA256, make_run, track, write_records, write_result

ONLINE = ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI")


def needs(package: str) -> None:
    pytest.importorskip(package, reason=f"needs {package}: pip install 'samebits[{package}]'")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was stopped after step 5 and resumed to step 8, with a folder for the records of each part."""
    for name in ONLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no login
    return make_run(tmp_path / "run")


def follow_twice(run: Path, name: str) -> None:
    write_records(run, range(1, 6))
    assert track(run, name, "stopped") == []
    write_records(run, range(6, 9))
    write_result(run)
    assert track(run, name, "done") == []


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, with W&B's own protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.full
def test_wandb_has_an_offline_run_that_a_resume_continues(run: Path) -> None:
    needs("wandb")
    follow_twice(run, "wandb")
    files = sorted((run / "trackers" / "wandb" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    identity = json.loads((run / "trackers" / "wandb.json").read_text())["id"]
    history: dict[int, dict[str, Any]] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for file in files:
        for record in wandb_records(file):
            if record.HasField("run"):
                assert (record.run.run_id, record.run.display_name, record.run.project) == (identity, "run", "garden")
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                history.setdefault(record.history.step.num, {})[name] = json.loads(item.value_json)
            for item in record.summary.update:
                summary[item.key or item.nested_key[0]] = json.loads(item.value_json)
    assert [(step, row["train/loss"]) for step, row in sorted(history.items())] == [(n, 1 / n) for n in range(1, 9)]
    assert [history[step]["eval/top1"] for step in (5, 8)] == [0.05, 0.08]
    assert config["optim"] == {"lr": 0.1, "betas": [0.9, 0.999]}
    assert summary["weights_sha256"] == SHA256


@pytest.mark.full
@pytest.mark.parametrize("store", ["own", "files"])
def test_mlflow_has_one_run_that_a_resume_continues(run: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow")
    needs("sqlalchemy")
    from mlflow import MlflowClient

    uri = f"sqlite:///{run / 'trackers' / 'mlflow' / 'mlflow.db'}"
    if store == "files":
        uri = (run.parent / "mlruns").as_uri()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    follow_twice(run, "mlflow")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("garden")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["optim.lr"] == "0.1"
    assert found.data.tags["weights_sha256"] == SHA256
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in losses] == [(step, 1 / step) for step in range(1, 9)]
    top1 = client.get_metric_history(found.info.run_id, "eval/top1")
    assert [(metric.step, metric.value) for metric in top1] == [(5, 0.05), (8, 0.08)]
