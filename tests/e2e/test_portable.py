"""Nothing needs what only Linux has: the affinity mask, /proc, memory files, real-time signals."""

import os
import re
import shutil
import sys
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from samebits.cluster import stacks
from samebits.cluster.address import command_of, port_holder
from samebits.cores import num_cores
from samebits.data.images import read_rgb
from samebits.data.loader import choose_num_workers
from samebits.launch.failures import count_memory_kills, out_of_memory
from samebits.provenance.fingerprint import cpu_name
from samebits.recipes.listing import find_faults
from samebits.scratch import is_running
from tests.faults.faults import Job
from tests.runs import PYTHON_PATH, ROOT, TINY, kill_session, result, samebits, start


def test_cores_are_those_of_the_affinity_mask_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert num_cores() == 3


@pytest.mark.parametrize(("count", "expected"), [(6, 6), (None, 1)])
def test_cores_are_the_machine_s_where_there_is_no_affinity_mask(
    count: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: count)
    assert num_cores() == expected


def test_only_one_place_counts_cores() -> None:
    machine = {"src/samebits/cores.py", "src/samebits/doctor/machine.py", "src/samebits/provenance/fingerprint.py"}
    counting = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src" / "samebits").rglob("*.py")
        if re.search(r"sched_getaffinity|cpu_count\(", path.read_text())
    }
    assert counting <= machine
    for name in machine - {"src/samebits/cores.py"}:
        assert "sched_getaffinity" not in (ROOT / name).read_text()


class _Costly(list[int]):
    is_costly = True


def test_pictures_are_read_without_an_affinity_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert choose_num_workers("auto", _Costly(), torch.device("cpu"), num_ranks_here=1) == 4
    assert find_faults(["a.png"], lambda name: read_rgb(tmp_path / name)) == {}


def test_a_process_is_looked_at_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: object, *_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    for name in ("read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, absent)
    monkeypatch.setattr("os.readlink", absent)
    monkeypatch.setattr(psutil, "PROCFS_PATH", "/not-mounted")
    assert is_running(os.getpid())
    assert (command_of(os.getpid()), port_holder(29400), stacks.namespace()) == ("", "", "")
    assert not stacks.is_stopped(os.getpid())
    assert (count_memory_kills(), cpu_name() != "") == (0, True)
    monkeypatch.setattr("os.open", absent)
    assert out_of_memory(os.getpid(), 0) == ""


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """Environment in which every Python process lacks what only Linux has; it leaves a file that shows it."""
    place = tmp_path / "site"
    place.mkdir()
    shutil.copy(ROOT / "tests/e2e/without_linux.py", place / "sitecustomize.py")
    path = os.pathsep.join([PYTHON_PATH, str(place)])
    return {"PYTHONPATH": path, "SAMEBITS_TEST_HIDDEN": str(tmp_path / "is hidden")}


@pytest.mark.full
def test_two_processes_train_without_what_only_linux_has(tmp_path: Path, hidden: dict[str, str]) -> None:
    samebits("train", TINY, "--procs", 2, "--run-dir", tmp_path / "run", cwd=tmp_path, **hidden)
    assert (tmp_path / "is hidden").exists()
    assert result(tmp_path / "run")["weights_sha256"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["proc", "shared memory"])
def test_two_processes_recover_without_one_thing(tmp_path: Path, hidden: dict[str, str], name: str) -> None:
    (tmp_path / "slow").touch()
    slow = ("data.slow_s=0.2", f"data.slow_while={tmp_path}/slow", "cluster.recovery=in_step", "--max-restarts", 1)
    words, more = ("train", TINY, *slow, "--procs", 2, "--run-dir", tmp_path / "run"), {"SAMEBITS_TEST_HIDE": name}
    run = Job(tmp_path, start(*words, cwd=tmp_path, **more, **hidden))
    try:
        run.wait_for_step(1)
        run.workers()[0].kill()
        (tmp_path / "slow").unlink()
        code, said = run.ended()
    finally:
        kill_session(run.process)
    assert code == 0, said
    if name == "proc":
        assert "cluster.recovery=in_step does not work with a system that does not show a process its conn" in said
        assert "restart 1 of 1 from the last checkpoint" in said
        samebits("verify", tmp_path / "run", cwd=tmp_path, **more, **hidden)
    else:
        assert "restart 1 of 1: the other processes continue" in said


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "darwin", reason="there is nothing to hide")
def test_the_doctor_examines_a_machine_without_what_only_linux_has(tmp_path: Path, hidden: dict[str, str]) -> None:
    said = samebits("doctor", cwd=tmp_path, **hidden).stdout
    assert "this system has no /dev/shm" in said
    assert re.search(r"memory\s+unknown", said)
