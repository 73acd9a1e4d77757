"""Files of the user among those of a run, full disks, and texts that are not UTF-8: an error, and nothing lost."""

import hashlib
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from samebits.errors import CheckpointError
from samebits.inference import hub
from samebits.plain_file import finite_numbers, json_text, parse_json
from samebits.provenance import run_files
from samebits.provenance.record import sha256_of_json
from samebits.provenance.run_files import RunFiles
from samebits.report.records import read_records
from samebits.storage import checkpoint
from samebits.storage.checkpoint import Checkpoint, load_checkpoint, mark_best, prune, save, steps
from samebits.storage.run_folder import RunFolder, check_run_dir, check_run_path, new_folder, write_atomically
from tests.conftest import mount
from tests.unit.storage.test_checkpoints import small


def test_a_file_in_a_checkpoint_stays_when_the_step_is_saved_again(tmp_path: Path) -> None:
    save(small(40), tmp_path)
    (tmp_path / "step-000040" / "notes.txt").write_text("mine")
    (tmp_path / "step-000040" / "plots").mkdir()
    for value in (1.0, 2.0):  # twice: the first one must leave nothing that stops the second
        save(small(40, value), tmp_path)
        assert os.listdir(tmp_path) == ["step-000040"]
        assert (tmp_path / "step-000040" / "notes.txt").read_text() == "mine"
        assert (tmp_path / "step-000040" / "plots").is_dir()
        assert load_checkpoint(tmp_path / "step-000040").weights["w"].tolist() == [value] * 3


def test_a_crash_between_commit_and_return_of_a_file_is_made_up_for(tmp_path: Path) -> None:
    save(small(40), tmp_path)
    old = tmp_path / ".step-000040.77.partial-old"
    shutil.copytree(tmp_path / "step-000040", old)
    (old / "notes.txt").write_text("mine")
    users = tmp_path / ".step-mine.partial"
    users.mkdir()
    (users / "state.json").write_text("mine")
    checkpoint.clean(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".step-mine.partial", "step-000040"]
    assert (tmp_path / "step-000040" / "notes.txt").read_text() == "mine"
    assert (users / "state.json").read_text() == "mine"


def test_a_file_in_a_checkpoint_keeps_it_from_being_pruned(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(small(step), tmp_path)
    (tmp_path / "step-000010" / "notes.txt").write_text("mine")
    prune(tmp_path, 30, 1, lambda _: False)
    assert steps(tmp_path) == [10, 30]
    assert load_checkpoint(tmp_path / "step-000010").step == 10


def test_a_copy_under_another_step_is_neither_pruned_nor_counted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(small(step), tmp_path)
    shutil.copytree(tmp_path / "step-000030", tmp_path / "step-000033")
    save(small(40), tmp_path)
    prune(tmp_path, 40, 2, lambda _: False)
    assert steps(tmp_path) == [30, 33, 40]


def test_a_damaged_checkpoint_is_pruned(tmp_path: Path) -> None:
    for step in (10, 20):
        save(small(step), tmp_path)
    (tmp_path / "step-000010" / "state.json").write_text("{")
    prune(tmp_path, 20, 1, lambda _: False)
    assert steps(tmp_path) == [20]


def test_a_folder_of_notes_is_no_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    notes = folder.checkpoints / "step-000040"
    notes.mkdir(parents=True)
    (notes / "notes.txt").write_text("mine")
    assert not folder.has_checkpoints
    assert steps(folder.checkpoints) == []
    save(small(40), folder.checkpoints)
    assert folder.has_checkpoints
    assert (notes / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["rank-0.log", "launcher.log", "stacks-rank-1.txt"])
def test_a_user_s_log_in_a_folder_without_a_run_is_not_appended_to(name: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).write_text("my own log\n")
    with pytest.raises(CheckpointError, match=f"a run would overwrite logs/{name} in it"):
        check_run_dir(tmp_path)


def test_logs_of_other_processes_of_the_same_run_and_of_other_programs_are_allowed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "launcher.log").write_text("2026-11-27 20:54:26 waiting for 2 nodes\n")
    (logs / "rank-0.log").write_text("2026-11-27 20:54:26,123 INFO    samebits.engine: start\n")
    (logs / "rank-1.log").write_text("2026-11-27 20:54:26,123 WARNING py.warnings: old\n")
    (logs / "rank-2.log").touch()
    (logs / "mine.txt").write_text("mine")
    check_run_dir(tmp_path)


def of_size(step: int, num_bytes: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.ones(num_bytes // 4)}, {"state": {}, "param_groups": []}, {})


def assert_says(caught: pytest.ExceptionInfo[CheckpointError], path: Path, reason: str) -> None:
    text = str(caught.value)
    assert f"can't write {path}: {reason}" in text
    assert "earlier checkpoints, if any, are intact" in text
    assert "--resume auto" in text
    assert ("Free disk space" in text) == (reason == "No space left on device")


def test_on_a_full_disk_the_old_checkpoint_survives_and_the_new_one_leaves_no_scraps(small_disk: Path) -> None:
    save(of_size(1, 300_000), small_disk)
    with pytest.raises(CheckpointError) as caught:
        save(of_size(2, 900_000), small_disk)
    assert_says(caught, small_disk / "step-000002", "No space left on device")
    assert os.listdir(small_disk) == ["step-000001"]
    assert load_checkpoint(small_disk / "step-000001").step == 1
    save(of_size(3, 200_000), small_disk)  # there is room again


def test_on_a_full_disk_a_file_stays_as_it_was(small_disk: Path) -> None:
    file = small_disk / "result.json"
    write_atomically(file, b"old")
    with pytest.raises(CheckpointError) as caught:
        write_atomically(file, bytes(2_000_000))
    assert_says(caught, file, "No space left on device")
    assert file.read_bytes() == b"old"
    assert os.listdir(small_disk) == ["result.json"]


def test_a_file_that_may_not_grow_is_like_a_full_disk(tmp_path: Path) -> None:
    save(of_size(1, 1000), tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            save(of_size(2, 500_000), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_says(caught, tmp_path / "step-000002", "File too large")
    assert os.listdir(tmp_path) == ["step-000001"]


def test_on_a_read_only_disk_nothing_can_be_written_and_all_can_be_read(small_disk: Path) -> None:
    save(of_size(1, 1000), small_disk)
    mount("-o", "remount,ro", str(small_disk))
    with pytest.raises(CheckpointError) as caught:
        save(of_size(2, 1000), small_disk)
    assert_says(caught, small_disk / "step-000002", "Read-only file system")
    with pytest.raises(CheckpointError) as caught:
        write_atomically(small_disk / "result.json", b"new")
    assert_says(caught, small_disk / "result.json", "Read-only file system")
    with pytest.raises(CheckpointError):
        mark_best(small_disk, {"step": 1})
    with pytest.raises(CheckpointError) as caught:
        RunFolder(small_disk / "run").open()
    assert_says(caught, small_disk / "run", "Read-only file system")
    with pytest.raises(CheckpointError) as caught:
        new_folder("digits", small_disk / "runs")
    assert f"run folder {small_disk / 'runs' / 'digits-0001'}: Read-only file system" in str(caught.value)
    assert load_checkpoint(small_disk / "step-000001").step == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_another_user_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError) as caught:
        save(of_size(1, 1000), tmp_path)
    assert_says(caught, tmp_path / "step-000001", "Permission denied")


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
