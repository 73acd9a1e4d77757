"""Several launchers, as on several machines: one goes, one comes, and the weights are those of an undisturbed run."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import warm_start
from tests.cluster.hosts import Host
from tests.faults.faults import SETTINGS, Job
from tests.runs import (
    LONG_S,
    SAMEBITS,
    TINY,
    environment,
    kill_machine,
    kill_session,
    own_port,
    processes_with,
    result,
    wait_until,
    weights,
)

QUICK = ("cluster.node_timeout_s=12", "cluster.last_call_s=0.5", "cluster.join_timeout_s=60")


@pytest.fixture
def slow(tmp_path: Path) -> tuple[str, str]:
    """Settings of a run that gets on only slowly, until `hurry`."""
    (tmp_path / "slow").touch()
    return ("data.slow_s=0.2", f"data.slow_while={tmp_path}/slow")


def hurry(folder: Path) -> None:
    """Let a slow run continue at full speed."""
    (folder / "slow").unlink()


@contextmanager
def nodes(folder: Path, *arguments: object, places: Sequence[Host] = ()) -> Iterator[Callable[..., Job]]:
    """Begins nodes of one run, each on one of the hosts if there are any; at the end all of them are gone."""
    port, address = own_port(), places[0].address if places else "127.0.0.1"
    begun: list[Job] = []

    def begin(name: str, waits: bool = True, more: Sequence[str] = ()) -> Job:
        if begun and waits:  # The first one serves the rendezvous, so the run needs it.
            wait_until(lambda: _listens(address, port), 120)
        (folder / name / "tmp").mkdir(parents=True)
        meet = ["--rdzv-endpoint", f"{address}:{port}"]
        with (folder / name / "said").open("w") as said:
            words = [*SAMEBITS, "train", TINY, *SETTINGS, *QUICK, *map(str, arguments), *more, "--procs", "1", *meet,
                     "--run-dir", str(folder / "run")]  # fmt: skip
            process = warm_start.popen(
                places[len(begun)].command(words) if places else words,
                cwd=folder / name, env=environment(TMPDIR=str(folder / name / "tmp")), stdout=said, stderr=said,
                start_new_session=True, text=True,
            )  # fmt: skip
        begun.append(Job(folder, process))
        return begun[-1]

    try:
        yield begin
    finally:
        for job in begun:
            kill_session(job.process)


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def kill_node(job: Job) -> None:
    """kill -9 of all of it."""
    kill_machine(job.process.pid)


def said(folder: Path, name: str) -> str:
    return (folder / name / "said").read_text()


@pytest.mark.full
def test_a_lost_node_is_done_without_and_taken_back(undisturbed: str, slow: tuple[str, str], tmp_path: Path) -> None:
    with nodes(tmp_path, *slow, "--nodes", "2:3") as begin:
        first = begin("a")
        second, third = begin("b"), begin("c")
        wait_until(lambda: "3 processes on" in said(tmp_path, "a"), 120)  # on a busy machine the third may come later
        first.wait_for_step(2)
        kill_node(third)
        lost = "continuing with 2 processes on 2 nodes"
        wait_until(lambda: lost in said(tmp_path, "a"), 120)
        first.wait_for_step(first.steps() + 1)  # else it may be as if there had been no world of two
        fourth = begin("d")
        wait_until(lambda: "continuing with 3 processes on 3 nodes" in said(tmp_path, "a").split(lost)[-1], 120)
        hurry(tmp_path)
        for job in (first, second, fourth):
            assert job.process.wait(LONG_S) == 0, said(tmp_path, "a") + said(tmp_path, "b")
    assert weights(tmp_path / "run") == undisturbed
    sizes = [world["size"] for world in result(tmp_path / "run")["worlds"]]
    assert sizes[-2:] == [2, 3]
    wait_until(lambda: not processes_with(str(tmp_path)))


@pytest.mark.lab
def test_a_node_that_the_run_waits_for_may_be_lost_and_started_again(
    undisturbed: str, slow: tuple[str, str], tmp_path: Path
) -> None:
    with nodes(tmp_path, *slow, "--nodes", "2", "--max-restarts", "1") as begin:
        first, second = begin("a"), begin("b")
        first.wait_for_step(2)
        kill_node(second)
        third = begin("c")
        hurry(tmp_path)
        for job in (first, third):
            assert job.process.wait(LONG_S) == 0, said(tmp_path, "a") + said(tmp_path, "c")
    assert weights(tmp_path / "run") == undisturbed


@pytest.mark.lab
def test_a_node_with_a_stop_signal_saves_and_leaves(undisturbed: str, slow: tuple[str, str], tmp_path: Path) -> None:
    with nodes(tmp_path, *slow, "--nodes", "1:2") as begin:
        first = begin("a")
        second = begin("b")
        wait_until(lambda: "2 processes on" in said(tmp_path, "a"), 120)
        first.wait_for_step(first.steps() + 2)
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(LONG_S) == 128 + signal.SIGTERM, said(tmp_path, "b")
        hurry(tmp_path)
        assert first.process.wait(LONG_S) == 0, said(tmp_path, "a")
    # Saved where it stood: no step was done twice.
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]][-2:] == [2, 1]
    assert weights(tmp_path / "run") == undisturbed


@pytest.mark.full
def test_a_node_lost_while_it_joins_is_done_without(undisturbed: str, slow: tuple[str, str], tmp_path: Path) -> None:
    with nodes(tmp_path, *slow, "--nodes", "1:2") as begin:
        first = begin("a")
        first.wait_for_step(2)
        second = begin("b")
        wait_until(lambda: "; new: " in said(tmp_path, "a"), 120)
        kill_node(second)
        name = f"pid {second.process.pid}"
        wait_until(lambda: f"lost or left: {socket.gethostname()} {name}" in said(tmp_path, "a"), 120)
        hurry(tmp_path)
        assert first.process.wait(LONG_S) == 0, said(tmp_path, "a")
    assert weights(tmp_path / "run") == undisturbed


@pytest.mark.full
def test_an_error_that_no_restart_can_mend_ends_all_nodes_with_its_text(tmp_path: Path) -> None:
    with nodes(tmp_path, "--nodes", "2", "--max-restarts", "2", "data.num_samples=0") as begin:
        first, second = begin("a"), begin("b")
        codes = {first.process.wait(LONG_S), second.process.wait(LONG_S)}
    assert codes == {3}, said(tmp_path, "a") + said(tmp_path, "b")
    for name in ("a", "b"):
        assert "data error: the training set is empty" in said(tmp_path, name)
        assert "restart 1 of 2" not in said(tmp_path, name)


@pytest.mark.lab
def test_torchruns_own_restarts_and_nodes(undisturbed: str, slow: tuple[str, str], tmp_path: Path) -> None:
    port = own_port()

    # torch's way to share one store between worlds can't take in a node that comes later (seen with 2.15).
    variables = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def torchrun() -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1",
            "-m", "samebits", "train", str(TINY), *SETTINGS, *slow, "--run-dir", str(tmp_path / "run"),
            "--resume", "auto",
        ]  # fmt: skip
        with (tmp_path / "said").open("a") as file:
            return subprocess.Popen(
                command, cwd=tmp_path, env=variables, stdout=file, stderr=file, start_new_session=True
            )

    first = torchrun()
    job = Job(tmp_path, first)
    second = None
    try:
        job.wait_for_step(2)
        # Comes later: torchrun then stops all processes and starts them again, and does not count that as a restart.
        second = torchrun()
        wait_until(lambda: "2 processes on" in (tmp_path / "said").read_text(), 120)
        hurry(tmp_path)
        assert first.wait(LONG_S) == 0, (tmp_path / "said").read_text()
        assert second.wait(LONG_S) == 0
    finally:
        for process in filter(None, (first, second)):
            kill_session(process)
    assert weights(tmp_path / "run") == undisturbed
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]] == [1, 2]
