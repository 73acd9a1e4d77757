"""Kills, limits and a machine without shared memory: what they leave behind, and how a run reports them."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.faults.faults import SHM, SLOW, job
from tests.runs import LONG_S, TINY, environment, samebits, wait_until

ENDLESS = "epochs=1000"
NEXT_START = "from samebits.launch import forkserver\nwith forkserver.temp_folder(): pass"
TRAIN = f"{sys.executable} -P -m samebits train {TINY} epochs=1"


def next_start(tmp: Path) -> None:
    """What any command does that starts processes."""
    subprocess.run([sys.executable, "-c", NEXT_START], env=environment(TMPDIR=str(tmp)), check=True, timeout=LONG_S)


def folders(tmp: Path) -> set[str]:
    return {path.name for path in tmp.glob("pymp-*")}


def answers_to_stops(pid: int) -> bool:
    """Whether the launcher has set its own handler for SIGTERM, which it does when it starts the ranks."""
    (caught,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_what_a_kill_of_the_whole_group_leaves_is_swept_by_the_next_start(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    with job(tmp_path, *SLOW, ENDLESS, "--procs", 2) as running:
        running.wait_for_step(2)
        left = folders(tmp)
        assert left
        next_start(tmp)  # it lives, so nothing of it is touched
        assert folders(tmp) == left
        running.wait_for_step(running.steps() + 2)
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(LONG_S)
        assert folders(tmp) == left
        next_start(tmp)
        assert not folders(tmp)
        assert running.left() == []


@pytest.mark.full
def test_a_run_does_not_notice_that_the_resource_tracker_was_killed(tmp_path: Path) -> None:
    with job(tmp_path, *SLOW, "--procs", 2) as running:
        running.wait_for_step(2)
        children = psutil.Process(running.process.pid).children()
        (tracker,) = [child for child in children if "resource_tracker" in str(child.cmdline())]
        tracker.kill()
        code, said = running.ended()
        assert code == 0, said
        assert "Traceback" not in said
        assert "resource_tracker" not in said
        assert running.left() == []


def test_ctrl_c_before_training_does_not_mention_saving(tmp_path: Path) -> None:
    with job(tmp_path, ENDLESS, "--procs", 2) as running:
        wait_until(lambda: answers_to_stops(running.process.pid))
        running.process.send_signal(signal.SIGINT)
        code, said = running.ended()
        assert code == 128 + signal.SIGINT, said
        assert "training has not started, so there is nothing to save" in said
        assert "finishing the step" not in said
        assert running.left() == []
    done = samebits("train", "--run-dir", tmp_path / "run", "--resume", "auto", cwd=tmp_path, code=2)
    assert "name a recipe, a preset or a file" in done.stderr


def test_a_limit_on_open_files_is_named_as_what_it_is(tmp_path: Path) -> None:
    line = f"ulimit -n 24; {TRAIN} --procs 2 --run-dir run"
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("launch error: too many open files")
    assert "a limit of 24 open files and connections" in done.stderr
    assert "ulimit -n 4096" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ("ro", "--procs 1 loader.num_workers=1"),
        ("size=4k", "--procs 2 loader.num_workers=1"),
    ],
)
def test_a_machine_without_shared_memory_is_reported(tmp_path: Path, options: str, more: str) -> None:
    unshare = ["unshare", "--mount", "--map-root-user"] if os.geteuid() else ["unshare", "--mount"]
    mount = f"mount -t tmpfs -o {options} tmpfs {SHM}"
    if not shutil.which("unshare") or subprocess.run([*unshare, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount")
    done = subprocess.run(
        [*unshare, "sh", "-c", f"{mount} && {TRAIN} {more} --run-dir run"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "processes can't share memory on this machine" in done.stderr
    assert "--shm-size" in done.stderr
    assert "Traceback" not in done.stderr
