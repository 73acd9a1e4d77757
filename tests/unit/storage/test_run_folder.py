"""The folder of a run: one owner at a time, also without locks, and files whole."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.errors import CheckpointError
from samebits.storage.run_folder import RunFolder, check_run_dir, check_target, new_folder, write_atomically
from samebits.storage.run_lock import RunLock


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has tmp_path/run."""
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from samebits.storage.run_folder import RunFolder
        folder = RunFolder(Path(sys.argv[1]))
        folder.open()
        print("open", flush=True)
        sys.stdin.readline()
        folder.close()
        print("closed", flush=True)
        time.sleep(1000)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.communicate()


def test_a_run_folder_in_use_is_refused_and_its_owner_named(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path / "run").open()
    assert f"run folder {tmp_path / 'run'} is in use" in str(caught.value)
    assert f"process {owner.pid} on {os.uname().nodename}" in str(caught.value)
    assert "another --run-dir" in str(caught.value)


def test_a_run_folder_is_free_when_its_owner_is_killed(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    folder = RunFolder(tmp_path / "run")
    folder.open()
    folder.close()


def test_a_run_folder_is_free_when_its_owner_closes_it(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    owner.stdin.write("\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "closed\n"
    folder = RunFolder(tmp_path / "run")
    folder.open()
    folder.close()
    folder.close()  # a second time does no harm


def test_of_many_that_want_a_run_folder_only_one_has_it_at_a_time(tmp_path: Path) -> None:
    owners, most = [0], [0]
    guard = threading.Lock()

    def want() -> None:
        num_opened = 0
        while num_opened < 50:
            folder = RunFolder(tmp_path)
            try:
                folder.open()
            except CheckpointError:
                continue
            num_opened += 1
            with guard:
                owners[0] += 1
                most[0] = max(most[0], owners[0])
            with guard:
                owners[0] -= 1
            folder.close()

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1


def test_new_folders_are_numbered_and_none_is_taken_twice(tmp_path: Path) -> None:
    (tmp_path / "digits-0007").mkdir()
    (tmp_path / "digits-2-0009").mkdir()
    (tmp_path / "digits-old").mkdir()
    assert new_folder("digits", tmp_path).name == "digits-0008"
    assert new_folder("mnist", tmp_path / "deeper").name == "mnist-0001"
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.extend(new_folder("digits", tmp_path) for _ in range(5))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in made) == [f"digits-{number:04}" for number in range(9, 29)]


def test_a_new_folder_where_a_file_is_in_the_way_is_an_error_with_a_text(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(CheckpointError, match=r"can't write .*digits-0001: Not a directory") as caught:
        new_folder("digits", tmp_path / "runs")
    assert caught.value.slots == {"fix": "Choose another --run-dir."}


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_atomically(file, b"old")
    with file.open("rb") as reader:
        write_atomically(file, b"new and longer")
        assert reader.read() == b"old"
    assert file.read_bytes() == b"new and longer"
    assert os.listdir(tmp_path) == ["result.json"]


def test_what_is_written_as_json_comes_back_and_what_is_none_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("result.json", {"name": "Zahl π", "value": 0.1})
    assert folder.read_json("result.json") == {"name": "Zahl π", "value": 0.1}
    assert json.loads((tmp_path / "result.json").read_text()) == folder.read_json("result.json")
    with pytest.raises(CheckpointError, match=r"none\.json does not exist"):
        folder.read_json("none.json")
    (tmp_path / "torn.json").write_text('{"a": 1')
    with pytest.raises(CheckpointError, match=r"torn\.json can't be read"):
        folder.read_json("torn.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"list\.json holds no JSON object"):
        folder.read_json("list.json")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file/x", "file is not a folder"), ("there", "it is a folder"), (f"{300 * 'a'}/x", "File name too long")],
)
def test_a_path_that_can_not_be_written_is_refused_before_the_work(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match=reason) as caught:
        check_target(tmp_path / name)
    assert caught.value.slots == {"fix": "Choose another path."}
    check_target(tmp_path / "new" / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


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


def test_no_other_user_may_write_into_the_lock_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    lock = RunLock(tmp_path)
    try:
        lock.take()
        assert lock.path.stat().st_mode & 0o022 == 0
    finally:
        lock.release()
        os.umask(before)
