"""A rank that hangs is named, with the stacks of all ranks; the run ends, or continues to the same weights."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.runs import (
    ROOT,
    communicate_all,
    kill_session,
    own_port,
    process_with_open,
    records,
    running,
    samebits,
    start,
    wait_until,
    weights,
)

LIMIT_S = 150
STUCK = ROOT / "tests" / "e2e" / "stuck_recipe.py"
# After half of it, a rank without reports counts as silent. On a busy machine it must not be one that makes progress.
TIMEOUT = "watch.hang_timeout_s=8"
SETTINGS = [STUCK, "data.num_samples=201", TIMEOUT, "report.every_steps=1", "report.tensorboard=false"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    samebits("train", *SETTINGS, "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return folder / "run"


@pytest.mark.full
def test_a_rank_that_reads_forever_is_named_and_the_run_ends_as_without_it(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stuck = {"STUCK": f"sleeps,1,{tmp_path / 'once'}"}
    with running(
        "train", *SETTINGS, "--procs", 2, "--max-restarts", 1, "--run-dir", folder, cwd=tmp_path, **stuck
    ) as process:
        _, errors = process.communicate(timeout=LIMIT_S)
    assert re.search(r"hang: rank 1 has made no progress for \d+ s: reading samples, step 5", errors)
    assert "1 rank waited for it" in errors
    assert "restart 1 of 1" in errors
    assert weights(folder) == weights(run)
    guilty, waiting = ((folder / "logs" / f"stacks-rank-{rank}.txt").read_text() for rank in (1, 0))
    assert "stuck_recipe.py" in guilty.split("\n\n")[1]  # the main thread comes first
    assert "parallel/reduce.py" in waiting.split("\n\n")[1]


def test_a_stopped_process_is_named_and_killed_and_the_run_ends_as_without_it(run: Path, tmp_path: Path) -> None:
    rank = 0  # the harder one: the others hear of each other through it
    folder, slow = tmp_path / "run", tmp_path / "slow"
    slow.touch()
    more = ["data.slow_s=0.2", f"data.slow_while={slow}", "--procs", 2, "--max-restarts", 1, "--run-dir", folder]
    with running("train", *SETTINGS, *more, cwd=tmp_path) as process:
        wait_until(lambda: len(records(folder, "train")) > 2, LIMIT_S)
        pid = wait_until(lambda: process_with_open(folder / "logs" / f"rank-{rank}.log"))
        os.kill(pid, signal.SIGSTOP)
        slow.unlink()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert f"hang: rank {rank} has given no sign of life" in errors
    assert f"kill -CONT {pid}" in errors
    assert weights(folder) == weights(run)


@pytest.mark.full
def test_a_world_started_by_hand_detects_a_hang_and_all_end_with_the_same_text(tmp_path: Path) -> None:
    folder, meeting = tmp_path / "run", f"tcp://127.0.0.1:{own_port()}"
    world = ["--init", meeting, "--world-size", 2, "--run-dir", folder]
    stuck = {"STUCK": f"sleeps,1,{tmp_path / 'once'}"}
    processes = [
        start("train", *SETTINGS, *world, "--rank", rank, cwd=tmp_path, RANK=str(rank), **stuck) for rank in range(2)
    ]
    texts = [errors for _, errors in communicate_all(processes)]
    assert [process.returncode for process in processes] == [4, 4]
    hangs = {text[text.index("hang:") :].strip() for text in texts}
    assert len(hangs) == 1
    assert "rank 1 has made no progress" in hangs.pop()
    assert len(list((folder / "logs").glob("stacks-rank-*.txt"))) == 2


@pytest.mark.full
def test_a_rank_that_is_stopped_in_an_evaluation_is_named_by_the_other(run: Path, tmp_path: Path) -> None:
    # As torchrun starts them, which itself waits for half a minute before it kills one that is stopped.
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port())}
    stuck = {"STUCK": "stops in evaluation,1,"}
    processes = [start("eval", run, TIMEOUT, cwd=tmp_path, **world, **stuck, RANK=str(rank))
                 for rank in range(2)]  # fmt: skip
    try:
        _, text = processes[0].communicate(timeout=LIMIT_S)
    finally:
        for process in processes:
            kill_session(process)
    assert processes[0].returncode == 4
    assert text.count("hang: rank 1 has given no sign of life") == 1
    assert f"kill -CONT {processes[1].pid}" in text
    assert (run / "logs" / "stacks-rank-0.txt").is_file()
