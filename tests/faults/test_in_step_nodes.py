"""cluster.recovery=in_step with several launchers: any process and node but the first may be lost, to the same weights.

The first one serves the rendezvous. Without it the run ends, and continues from a checkpoint.
"""

import signal
from pathlib import Path

import psutil
import pytest

from samebits.storage.checkpoint import steps
from tests.faults.faults import WAIT_S, Job
from tests.faults.test_nodes import hurry, kill_node, nodes, said
from tests.runs import LONG_S, processes_with, records, result, samebits, wait_until, weights

NAMES = "abc"

pytestmark = pytest.mark.full


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
    assert not (folder / "run" / ".rendezvous-key").exists()


def test_the_other_node_finishes_the_step_of_a_lost_one(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "1:2") as begin:
        jobs = [begin(name) for name in "ab"]
        jobs[0].wait_for_step(2)
        lost = jobs.pop()
        survivors = pids(jobs)
        kill_node(lost)
        wait_until(lambda: any("are kept" in said(tmp_path, name) or jobs[0].steps() > 6 for name in "ab"), 60)
        jobs[0].wait_for_step(jobs[0].steps() + 2)
        assert pids(jobs) == survivors
        check(tmp_path, undisturbed, jobs, "ab")
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]] == [2, 1]


@pytest.mark.parametrize("num_others", [1, 2])
def test_the_loss_of_the_node_that_serves_the_rendezvous_continues_from_a_checkpoint(
    num_others: int, undisturbed: str, tmp_path: Path
) -> None:
    size = f"1:{num_others + 1}"
    with nodes(tmp_path, *in_step(tmp_path), "checkpoint.every=2 steps", "--nodes", size) as begin:
        jobs = [begin(name) for name in "abc"[: num_others + 1]]
        jobs[0].wait_for_step(6)
        kill_node(jobs.pop(0))
        for job, name in zip(jobs, "bc", strict=False):
            assert job.process.wait(LONG_S) == 4, said(tmp_path, name)
            assert "has lost the rendezvous at" in said(tmp_path, name)
            assert "--resume auto" in said(tmp_path, name)
        wait_until(lambda: not processes_with(str(tmp_path)))
    hurry(tmp_path)
    samebits("train", "--run-dir", tmp_path / "run", "--resume", "auto", "--procs", 1, cwd=tmp_path)
    assert weights(tmp_path / "run") == undisturbed
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [*range(1, 35)]


def test_a_node_that_only_seemed_lost_gives_the_run_folder_up(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "1:3", "--max-restarts", "2") as begin:
        jobs = [begin(name) for name in "abc"]
        jobs[0].wait_for_step(2)
        psutil.Process(
            pids(jobs)[0]
        ).kill()  # so that rank 0 is on the second node: the first one serves the rendezvous
        wait_until(lambda: any("continuing with 3 processes" in said(tmp_path, name) for name in "abc"), WAIT_S)
        (successor,) = pids([jobs[0]])
        jobs[1].process.send_signal(signal.SIGSTOP)  # the launcher: its process continues, and holds the folder's lock
        try:
            kill_node(jobs.pop())  # broken connections: a launcher that writes no state now counts as lost
            lock = str(tmp_path / "run" / "run.lock")
            wait_until(lambda: any(file.path == lock for file in psutil.Process(successor).open_files()), WAIT_S)
            assert pids([jobs[1]])
        finally:
            jobs[1].process.send_signal(signal.SIGCONT)
        wait_until(lambda: any("continuing with 2 processes at" in said(tmp_path, name).split("continuing with 1 ")[-1]
                               for name in "ab" if "continuing with 1 " in said(tmp_path, name)), WAIT_S)  # fmt: skip
        assert pids([jobs[0]]) == [successor]
        check(tmp_path, undisturbed, jobs, "abc")
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]] == [3, 2, 3, 1, 2]


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


def test_a_node_joins_when_another_one_is_lost(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "1:2") as begin:
        first, second = begin("a"), begin("b")
        first.wait_for_step(2)
        kill_node(second)
        first.wait_for_step(first.steps() + 2)
        kept = pids([first])
        third = begin("c")
        wait_until(lambda: "continuing with 2 processes" in said(tmp_path, "a"), WAIT_S)
        assert pids([first]) == kept
        check(tmp_path, undisturbed, [first, third], "abc")
    assert [world["size"] for world in result(tmp_path / "run")["worlds"]] == [2, 1, 2]


def test_a_launcher_with_other_settings_is_refused_and_the_run_continues(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "1:2") as begin:
        first, second = begin("a"), begin("b")
        first.wait_for_step(2)
        kill_node(second)
        first.wait_for_step(first.steps() + 2)
        assert (tmp_path / "run" / ".rendezvous-key").stat().st_mode & 0o777 == 0o600
        third = begin("c", more=["optim.lr=7"])
        assert third.process.wait(LONG_S) == 4
        assert "7.0 here" in said(tmp_path, "c")
        check(tmp_path, undisturbed, [first], "ab")


def test_a_process_lost_shortly_before_the_end_is_no_failure(undisturbed: str, tmp_path: Path) -> None:
    with nodes(tmp_path, *in_step(tmp_path), "--nodes", "2", "--max-restarts", "2") as begin:
        jobs = [begin(name) for name in "ab"]
        jobs[0].wait_for_step(2)
        psutil.Process(pids(jobs)[0]).kill()
        # Its replacement starts in more time than the other process needs for the rest.
        check(tmp_path, undisturbed, jobs, "ab")
        assert "could not join" not in said(tmp_path, "a")


def test_fewer_nodes_than_the_minimum_end_the_run(tmp_path: Path) -> None:
    # A node that the run cannot do without may be silent for the whole time.
    with nodes(tmp_path, *in_step(tmp_path), "cluster.node_timeout_s=6", "--nodes", "2") as begin:
        jobs = [begin(name) for name in "ab"]
        jobs[0].wait_for_step(2)
        kill_node(jobs[1])
        assert jobs[0].process.wait(LONG_S) == 4
    assert "1 of 2 nodes remain" in said(tmp_path, "a")
    wait_until(lambda: not processes_with(str(tmp_path)))


def test_a_node_leaves_after_sigterm_and_the_last_ones_stop_and_save(undisturbed: str, tmp_path: Path) -> None:
    arguments = (*in_step(tmp_path), "--nodes", "1:3")
    with nodes(tmp_path, *arguments) as begin:
        jobs = [begin(name) for name in NAMES]
        jobs[0].wait_for_step(2)
        left = jobs.pop(1)
        kept = pids(jobs)
        left.process.send_signal(signal.SIGTERM)
        assert left.process.wait(LONG_S) == 128 + signal.SIGTERM
        assert "this machine has left the run" in said(tmp_path, "b")
        jobs[0].wait_for_step(jobs[0].steps() + 2)
        assert pids(jobs) == kept
        for job in reversed(jobs):
            job.process.send_signal(signal.SIGTERM)
        for job, name in zip(jobs, "ac", strict=True):
            assert job.process.wait(LONG_S) == 128 + signal.SIGTERM, said(tmp_path, name)
            assert "this machine has left" not in said(tmp_path, name)
        assert "the others meet at this machine: the run stops" in said(tmp_path, "a")
        assert "too few machines stay" in said(tmp_path, "c")
        assert steps(tmp_path / "run" / "checkpoints")[-1] == jobs[0].steps()
        wait_until(lambda: not processes_with(str(tmp_path)))
    hurry(tmp_path)
    samebits("train", "--run-dir", tmp_path / "run", "--resume", "auto", "--procs", 1, cwd=tmp_path)
    assert weights(tmp_path / "run") == undisturbed
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [*range(1, 35)]
