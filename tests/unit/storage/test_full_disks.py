"""A disk without room, a file that may not grow, a read-only disk: an error, and the old checkpoint survives."""

import os
import resource
from pathlib import Path

import pytest
import torch

from samebits.errors import CheckpointError
from samebits.storage.checkpoint import Checkpoint, load_checkpoint, mark_best, save
from samebits.storage.run_folder import RunFolder, new_folder, write_atomically
from tests.conftest import mount


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
