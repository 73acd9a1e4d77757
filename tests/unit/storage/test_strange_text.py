"""Texts that are not UTF-8, numbers beyond floats, and records without end: no traceback, and bounded memory."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from samebits.errors import CheckpointError
from samebits.inference import hub
from samebits.plain_file import finite_numbers, json_text, parse_json
from samebits.provenance import run_files
from samebits.provenance.record import sha256_of_json
from samebits.provenance.run_files import RunFiles
from samebits.report.records import read_records
from samebits.storage.run_folder import RunFolder, check_run_dir, check_run_path

SURROGATE = "a\ud800b"
NOT_UTF8 = os.fsdecode(b"run\xfe")


@pytest.mark.parametrize("value", [SURROGATE, NOT_UTF8, {SURROGATE: [SURROGATE]}, "ü"])
def test_json_with_a_lone_surrogate_comes_back_and_is_utf8(value: object, tmp_path: Path) -> None:
    text = json_text({"x": value})
    text.decode("utf-8")
    assert parse_json(text) == {"x": value}
    folder = RunFolder(tmp_path)
    folder.write_json("environment.json", {"x": value})
    assert folder.read_json("environment.json") == {"x": value}
    hub._write_json(tmp_path / "config.json", {"label_names": [value]})
    assert json.loads((tmp_path / "config.json").read_bytes()) == {"label_names": [value]}
    assert len(sha256_of_json(value)) == 64


def test_the_hash_of_json_is_that_of_its_text_in_utf8() -> None:
    assert sha256_of_json({"b": 1.5, "a": "ü"}) == hashlib.sha256('{"a":"ü","b":1.5}'.encode()).hexdigest()


def test_metrics_of_a_model_card_are_those_that_a_float_can_have() -> None:
    metrics = {"top1": 0.5, "huge": 10**400, "nan": float("nan"), SURROGATE: 1.0, "text": "x"}
    assert finite_numbers(metrics) == {"top1": 0.5, SURROGATE: 1.0}
    assert finite_numbers([1]) == {}


def test_a_run_folder_whose_path_is_not_utf8_is_refused(tmp_path: Path) -> None:
    run = tmp_path / NOT_UTF8
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        check_run_dir(run)
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        check_run_path(run)


def test_records_of_another_kind_are_not_kept(tmp_path: Path) -> None:
    lines = [
        '{"kind": "train", "step": 1}',
        '{"kind":"eval", "step": 1, "top1": 0.5}',
        '{"kind": "train", "x": "eval"}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "eval", "st')
    assert [record["kind"] for record in read_records(tmp_path)] == ["train", "eval"]
    assert read_records(tmp_path, "eval") == [{"kind": "eval", "step": 1, "top1": 0.5}]


def test_a_view_reads_a_limited_number_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MAX_RECORDS", 100)
    line = '{"kind": "train", "step": 1, "epoch": 0.1}\n'
    (tmp_path / "metrics.jsonl").write_text(line * 1000)
    assert len(list(RunFiles(tmp_path, is_tolerant=True).records())) == 100
    assert len(list(RunFiles(tmp_path).records())) == 1000
