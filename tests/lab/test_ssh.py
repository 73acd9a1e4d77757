"""`--hosts`: from one machine, through real ssh servers, on two."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host
from tests.lab import ssh
from tests.lab.conftest import SETTINGS
from tests.runs import LONG_S, SAMEBITS, processes_with, records, wait_until, weights


@pytest.fixture(scope="module")
def path(three: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose `ssh` reaches n1 and n2."""
    if reason := ssh.why_not():
        pytest.skip(reason)
    with ssh.servers(three[:2], tmp_path_factory.mktemp("ssh")) as place:
        yield place


@pytest.fixture
def variables(path: Path, environ: dict[str, str]) -> dict[str, str]:
    return {**environ, "PATH": f"{path}:{os.environ['PATH']}"}


def test_two_machines_train_from_one(three: list[Host], variables: dict[str, str], wanted: str, tmp_path: Path) -> None:
    command = [*SAMEBITS, "train", *SETTINGS, "--hosts", "n1:2,n2:1", "--run-dir", tmp_path / "run"]
    done = three[0].run(*command, env=variables, cwd=tmp_path, timeout=LONG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 processes on 2 hosts" in done.stdout
    assert "done in" in done.stdout
    assert weights(tmp_path / "run") == wanted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_kill_here_end_both_sides(
    number: signal.Signals, three: list[Host], variables: dict[str, str], tmp_path: Path
) -> None:
    more = ["epochs=2000", "report.every_steps=1", "--hosts", "n1:1,n2:1", "--run-dir", tmp_path / "run"]
    running = three[0].start(*SAMEBITS, "train", *SETTINGS, *more, env=variables, cwd=tmp_path)
    wait_until(lambda: records(tmp_path / "run", "train"), timeout_s=LONG_S)
    (here,) = [pid for pid in processes_with(f"{tmp_path}/run") if _is_ours(pid)]
    os.kill(here, number)
    said, _ = running.communicate(timeout=LONG_S)
    assert running.returncode == (130 if number == signal.SIGINT else -9)
    wait_until(lambda: not processes_with(f"{tmp_path}/run"), timeout_s=LONG_S)
    assert "stopped after step" in said or number == signal.SIGKILL
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_doctor_that_waits_over_there_ends_with_the_one_here(
    number: signal.Signals, three: list[Host], variables: dict[str, str], tmp_path: Path
) -> None:
    running = three[0].start(
        *SAMEBITS, "doctor", "--hosts", "n1,n2", "--run-dir", tmp_path / "run", env=variables, cwd=tmp_path
    )
    there = wait_until(lambda: [pid for pid in processes_with(f"{tmp_path}/run") if _has(pid, b"1")], timeout_s=LONG_S)
    for pid in there:  # the one on n1 now waits for it, for minutes
        os.kill(pid, signal.SIGSTOP)
    try:
        here = wait_until(
            lambda: [pid for pid in processes_with(f"{tmp_path}/run") if _has(pid, b"0")], timeout_s=LONG_S
        )
        (command,) = [pid for pid in processes_with(f"{tmp_path}/run") if _is_ours(pid)]
        os.kill(command, number)
        wait_until(lambda: not set(here) & set(processes_with(f"{tmp_path}/run")), timeout_s=LONG_S)
    finally:
        for pid in there:
            os.kill(pid, signal.SIGCONT)
    said, _ = running.communicate(timeout=LONG_S)
    assert running.returncode == (130 if number == signal.SIGINT else -9)
    assert "2 processes" not in said
    wait_until(lambda: not processes_with(f"{tmp_path}/run"), timeout_s=LONG_S)


def _has(pid: int, rank: bytes) -> bool:
    """Whether a process is a rank over there, and not the ssh or the shell that took the command to it."""
    words = _words(pid)
    return words[:1] == [sys.executable.encode()] and b"--rank" in words and words[words.index(b"--rank") + 1] == rank


def _is_ours(pid: int) -> bool:
    """Whether a process is the command that was typed, and not what took it to its host, or what it started."""
    words = _words(pid)
    return b"--hosts" in words and b"nsenter" not in words


def _words(pid: int) -> list[bytes]:
    """What was typed for a process; nothing if it has gone since it was listed."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_a_machine_that_ssh_cannot_reach_is_named(three: list[Host], variables: dict[str, str], tmp_path: Path) -> None:
    command = [*SAMEBITS, "train", *SETTINGS, "--hosts", "n1,n3", "--run-dir", tmp_path / "run"]
    done = three[0].run(*command, env=variables, cwd=tmp_path, timeout=LONG_S)
    assert done.returncode == 255
    assert "n3: ssh could not connect" in done.stderr
    wait_until(lambda: not processes_with(f"{tmp_path}/run"), timeout_s=LONG_S)


def test_the_doctor_compares_machines_through_ssh(three: list[Host], variables: dict[str, str], tmp_path: Path) -> None:
    done = three[0].run(*SAMEBITS, "doctor", "--hosts", "n1,n2", env=variables, cwd=tmp_path, timeout=LONG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes on 2 hosts" in done.stdout
    assert "0 problems" in done.stdout or "no problems found" in done.stdout  # a busy machine is a warning
