"""A run folder has one owner also where the file system has no locks."""

import errno
import fcntl
import os
import subprocess
import threading
from pathlib import Path

import pytest

from samebits.errors import CheckpointError
from samebits.storage.run_folder import RunFolder, check_run_dir


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS without its lock service, or Lustre without -o flock."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_run_starts_and_leaves_no_owner(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open()
    assert (tmp_path / "run" / "run.owner").read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"
    folder.close()
    assert not (tmp_path / "run" / "run.owner").exists()
    folder.open()
    folder.close()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_second_run_in_the_folder_is_refused_at_once(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.open()
    with pytest.raises(CheckpointError, match="is in use") as caught:
        second.open()
    assert f"process {os.getpid()}" in caught.value.slots["given"]
    assert str(tmp_path / "run.owner") in caught.value.slots["fix"]
    first.close()
    second.open()
    second.close()


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_folder_of_a_dead_process_is_free_and_one_of_another_host_is_not(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / "run.owner").write_text(f"process {dead.pid} on {os.uname().nodename}\n")
    folder = RunFolder(tmp_path)
    folder.open()
    folder.close()
    (tmp_path / "run.owner").write_text("process 1 on elsewhere\n")
    with pytest.raises(CheckpointError, match="is in use"):
        folder.open()


def test_a_lock_is_not_written_through_a_link_of_a_strangers_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError):
        RunFolder(run).open()
    with pytest.raises(CheckpointError, match="was not written by a run"):
        check_run_dir(run)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.yaml", "weights.safetensors", "result.json", "pictures/a.png"])
def test_a_folder_with_files_that_a_run_would_replace_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=name.partition("/")[0]):
        check_run_dir(tmp_path)
    (tmp_path / "run.lock").touch()  # then a run has written it
    check_run_dir(tmp_path)


def test_logs_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "run.lock").touch()
    (run / "logs" / "rank-0.log").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="symbolic link"):
        check_run_dir(run)


def test_partial_files_of_a_killed_process_are_gone_after_the_next_start(tmp_path: Path) -> None:
    from samebits.scratch import partial_path

    dead = subprocess.Popen(["true"])
    dead.wait()
    left = partial_path(tmp_path / "result.json").name.replace(str(os.getpid()), str(dead.pid))
    (tmp_path / left).touch()
    folder = RunFolder(tmp_path)
    folder.open()
    folder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "run.lock"]


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_process_that_takes_over_waits_for_the_lock_of_one_that_has_not_ended_yet(
    tmp_path: Path, request: pytest.FixtureRequest, has_locks: bool
) -> None:
    if not has_locks:
        request.getfixturevalue("no_locks")
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.open()
    with pytest.raises(CheckpointError, match="is in use"):
        second.open(wait_s=0.1)
    ending = threading.Timer(0.2, first.close)
    ending.start()
    second.open(wait_s=60.0)
    ending.join()  # it sets `finished` after the close that the other one waits for
    assert ending.finished.is_set()
    second.close()
