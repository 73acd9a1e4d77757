"""cluster.recovery=in_step with several launchers: any process and any node may be lost, to the same weights."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from samebits.storage.checkpoint import steps
from tests.faults.faults import WAIT_S, Job
from tests.faults.test_nodes import hurry, kill_node, nodes, said
from tests.runs import LONG_S, processes_with, records, result, samebits, wait_until, weights

NAMES = "abc"


def in_step(folder: Path) -> tuple[str, ...]:
    """Settings of a run that gets on only slowly, until `hurry`, and whose first world has all nodes.

    Broken connections show a loss. The heartbeat may take longer than the test: on a busy machine, a launcher that gets
    no turn for seconds must not count as lost.
    """
    (folder / "slow").touch()
    return (
        "cluster.recovery=in_step", "data.slow_s=0.2", f"data.slow_while={folder}/slow", "cluster.last_call_s=60",
        "cluster.node_timeout_s=120",
    )  # fmt: skip


def pids(jobs: list[Job]) -> list[int]:
    return [worker.pid for job in jobs for worker in job.workers()]


def check(folder: Path, undisturbed: str, jobs: list[Job], names: str) -> None:
    """Wait for the end of the remaining nodes, and check what they leave."""
    hurry(folder)
    output = "".join(f"--- {name}\n{said(folder, name)}" for name in names)
    for job in jobs:
        assert job.process.wait(LONG_S) == 0, output
    assert weights(folder / "run") == undisturbed, output
    assert [record["step"] for record in records(folder / "run", "train")] == [*range(1, 35)], "steps were repeated"
    wait_until(lambda: not processes_with(str(folder)))
    left = {path.name for path in (folder / "run").iterdir()} & {".crew", ".rendezvous-key"}
    assert not left


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "victim", [pytest.param(0, id="the first"), pytest.param(1, id="the second", marks=pytest.mark.full)]
)
def test_the_other_node_finishes_the_step_of_a_lost_one(victim: int, undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "1:2") as begin:
        jobs = [begin(name) for name in "ab"]
        jobs[0].wait_for_step(2)
        lost = jobs.pop(victim)
        survivors = pids(jobs)
        kill_node(lost)
        wait_until(lambda: any("are kept" in said(tmp_path, name) or jobs[0].steps() > 6 for name in "ab"), 60)
        jobs[0].wait_for_step(jobs[0].steps() + 2)
        assert pids(jobs) == survivors
        check(tmp_path, undisturbed, jobs, "ab")
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]] == [2, 1]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_node_that_only_seemed_lost_gives_the_run_folder_up(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "1:3", "--max-restarts", "2") as begin:
        jobs = [begin(name) for name in "abc"]
        jobs[0].wait_for_step(2)
        (successor,) = pids([jobs[1]])
        jobs[0].process.send_signal(signal.SIGSTOP)  # the launcher: its process continues, and holds the folder's lock
        try:
            kill_node(jobs.pop())  # broken connections: a launcher that writes no status now counts as lost
            lock = str(tmp_path / "run" / "run.lock")
            wait_until(lambda: any(file.path == lock for file in psutil.Process(successor).open_files()), WAIT_S)
            assert pids([jobs[0]])
        finally:
            jobs[0].process.send_signal(signal.SIGCONT)
        wait_until(lambda: any("continuing with 2 processes" in said(tmp_path, name) for name in "ab"), WAIT_S)
        assert pids([jobs[1]]) == [successor]
        check(tmp_path, undisturbed, jobs, "abc")
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]] == [3, 1, 2]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_lost_process_of_a_node_is_replaced(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "2", "--max-restarts", "2") as begin:
        jobs = [begin(name) for name in "ab"]
        jobs[0].wait_for_step(2)
        before = pids(jobs)
        psutil.Process(before[0]).kill()  # the harder one: it serves the others
        wait_until(lambda: len(pids(jobs)) == 2 and before[0] not in pids(jobs), WAIT_S)
        wait_until(lambda: any("continuing with 2 processes" in said(tmp_path, name) for name in "ab"), WAIT_S)
        assert set(before) - {before[0]} <= set(pids(jobs))
        check(tmp_path, undisturbed, jobs, "ab")
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]] == [2, 1, 2]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_node_joins_when_the_one_that_served_the_rendezvous_is_lost(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "1:2") as begin:
        first, second = begin("a"), begin("b")
        first.wait_for_step(2)
        kill_node(first)
        second.wait_for_step(second.steps() + 2)
        kept = pids([second])
        third = begin("c", waits=False)
        wait_until(lambda: "continuing with 2 processes" in said(tmp_path, "b"), WAIT_S)
        assert pids([second]) == kept
        check(tmp_path, undisturbed, [second, third], "abc")
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]] == [2, 1, 2]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_launcher_with_other_settings_is_refused_and_the_run_continues(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "1:2") as begin:
        first, second = begin("a"), begin("b")
        first.wait_for_step(2)
        kill_node(first)
        second.wait_for_step(second.steps() + 2)
        (path,) = (tmp_path / "run" / ".crew").glob("*/record.json")
        assert (path.parent / ".rendezvous-key").stat().st_mode & 0o777 == 0o600
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "shared": {**content["shared"], "optim.lr": "7"}}))
        third = begin("c", waits=False)
        assert third.process.wait(LONG_S) == 4
        assert "optim.lr: 7 there" in said(tmp_path, "c")
        check(tmp_path, undisturbed, [second], "ab")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_process_lost_shortly_before_the_end_is_no_failure(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "2", "--max-restarts", "2") as begin:
        jobs = [begin(name) for name in "ab"]
        jobs[0].wait_for_step(2)
        psutil.Process(pids(jobs)[0]).kill()
        # Its replacement starts in more time than the other process needs for the rest.
        check(tmp_path, undisturbed, jobs, "ab")
        assert "could not join" not in said(tmp_path, "a")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_fewer_nodes_than_the_minimum_end_the_run(tmp_path: Path) -> None:
    # A node that the run cannot do without may be silent for the whole time.
    with nodes(tmp_path, *in_step(tmp_path), "cluster.node_timeout_s=6", "--nodes", "2") as begin:
        jobs = [begin(name) for name in "ab"]
        jobs[0].wait_for_step(2)
        kill_node(jobs[0])
        assert jobs[1].process.wait(LONG_S) == 4
    assert "1 of 2 nodes remain" in said(tmp_path, "b")
    wait_until(lambda: not processes_with(str(tmp_path)))


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_node_leaves_after_sigterm_and_the_last_ones_stop_and_save(undisturbed: str, tmp_path: Path) -> None:
    arguments = (*in_step(tmp_path), "--nodes", "1:3")
    with nodes(tmp_path, *arguments) as begin:
        jobs = [begin(name) for name in NAMES]
        jobs[0].wait_for_step(2)
        kept = pids(jobs[1:])
        jobs[0].process.send_signal(signal.SIGTERM)  # it serves the rendezvous and has rank 0
        assert jobs[0].process.wait(LONG_S) == 128 + signal.SIGTERM
        assert "this machine has left the run" in said(tmp_path, "a")
        jobs[1].wait_for_step(jobs[1].steps() + 2)
        assert pids(jobs[1:]) == kept
        for job in jobs[1:]:
            job.process.send_signal(signal.SIGTERM)
        for job, name in zip(jobs[1:], "bc", strict=True):
            assert job.process.wait(LONG_S) == 128 + signal.SIGTERM, said(tmp_path, name)
            assert "this machine has left" not in said(tmp_path, name)
            assert "too few machines stay" in said(tmp_path, name)
        assert steps(tmp_path / "run" / "checkpoints")[-1] == jobs[1].steps()
        wait_until(lambda: not processes_with(str(tmp_path)))
    hurry(tmp_path)
    samebits("train", "--run-dir", tmp_path / "run", "--resume", "auto", "--procs", 1, cwd=tmp_path)
    assert weights(tmp_path / "run") == undisturbed
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [*range(1, 35)]
