"""Files that the user puts among those of a run: none of them is deleted, moved or overwritten."""

import os
import shutil
from pathlib import Path

import pytest

from samebits.errors import CheckpointError
from samebits.storage import checkpoint
from samebits.storage.checkpoint import load_checkpoint, prune, save, steps
from samebits.storage.run_folder import RunFolder, check_run_dir
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
