"""cluster.recovery=in_step: processes are killed or stopped, and the others finish the step, to the same weights."""

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.faults.faults import SETTINGS, STEPS_PER_EPOCH, WAIT_S, Job, job
from tests.runs import TINY, records, result, samebits, wait_until, weights

IN_STEP = ("cluster.recovery=in_step", "data.slow_s=0.05", "data.eval_slow_s=0.1")
NUM_MOMENTS = int(os.environ.get("FAULTS", "0"))
SEED = int(os.environ.get("FAULTS_SEED", "1"))


@dataclass(frozen=True)
class Loss:
    """Which processes are lost, when and how.

    Attributes:
        size: Processes.
        victims: Their places among the processes.
        step: After this many steps.
        delay_s: And so much later.
        number: The signal.
        again_s: A second loss, of the last process, this long after the first; None: no second one.
    """

    size: int
    victims: tuple[int, ...]
    step: int
    delay_s: float = 0.0
    number: signal.Signals = signal.SIGKILL
    again_s: float | None = None

    def __str__(self) -> str:
        places = "-".join(map(str, self.victims))
        again = f"-again-{self.again_s:.2f}" if self.again_s is not None else ""
        return f"{self.number.name}-of-{places}-of-{self.size}-after-{self.step}-{self.delay_s:.3f}{again}"


def at_random(seed: int) -> Loss:
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4])
    return Loss(
        size,
        tuple(draw.sample(range(size), draw.choice([1, 1, size - 1]))),
        draw.randint(1, 33),
        0.15 * draw.random(),
        draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]),
        draw.choice([None, draw.random()]),
    )


KINDS = [
    pytest.param(Loss(3, (1,), 5), id="a rank"),
    pytest.param(Loss(3, (0,), 5), id="rank 0", marks=pytest.mark.full),
    pytest.param(Loss(4, (0, 2), 7, 0.03, again_s=0.1), id="three of four", marks=pytest.mark.full),
    pytest.param(Loss(2, (0,), 33, 0.05, signal.SIGSTOP), id="stopped at the end", marks=pytest.mark.full),
    *(pytest.param(at_random(SEED + number), marks=pytest.mark.full) for number in range(NUM_MOMENTS)),
]


def send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def lose(running: Job, loss: Loss) -> tuple[list[int], float]:
    """Cause the losses; return the process ids of the survivors, and how long the next step took to come."""
    workers = wait_until(lambda: (found := running.workers()) and len(found) >= loss.size and found, WAIT_S)
    running.wait_for_step(loss.step)
    time.sleep(loss.delay_s)
    lost = {workers[place] for place in loss.victims}
    before, began = running.steps(), time.monotonic()
    for victim in lost:
        send(victim, loss.number)
    if loss.again_s is not None:
        time.sleep(loss.again_s)
        if len(lost) < loss.size - 1:
            lost.add(workers[-1])
            send(workers[-1], signal.SIGKILL)
    # One step may have been complete already, and not recorded.
    wait_until(lambda: running.steps() >= min(before + 2, 34) or running.process.poll() is not None, WAIT_S)
    return [worker.pid for worker in workers if worker not in lost], time.monotonic() - began


@pytest.mark.parametrize("loss", KINDS, ids=str)
def test_the_others_finish_the_step_in_their_processes(loss: Loss, undisturbed: str, tmp_path: Path) -> None:
    with job(tmp_path, *IN_STEP, "--procs", loss.size, "--max-restarts", 5) as running:
        running.wait_for_step(1)
        step_records = (running.run / "steps.bin").stat().st_ino
        survivors, took_s = lose(running, loss)
        # At the last step the run may be over by now.
        if running.process.poll() is None and running.steps() < 30:
            assert {*survivors} <= {worker.pid for worker in running.workers()}
        code, said = running.ended()
        assert code == 0, said
        assert running.left() == []
        if 0 not in loss.victims:
            assert (running.run / "steps.bin").stat().st_ino == step_records, "all processes waited for a copy"
    assert weights(running.run) == undisturbed, said
    assert "from the last checkpoint" not in said, "steps were repeated"
    assert [record["step"] for record in records(running.run, "train")] == [*range(1, 35)]
    assert result(running.run)["steps"] == 34
    sizes = [world["size"] for world in result(running.run)["worlds"]]
    print(f"{loss}: two steps later after {took_s:.2f} s; worlds of {sizes}")


@pytest.mark.full
def test_without_restarts_the_run_continues_with_fewer_processes(undisturbed: str, tmp_path: Path) -> None:
    with job(tmp_path, *IN_STEP, "--procs", "2:3") as running:
        lose(running, Loss(3, (2,), 5))
        code, said = running.ended()
    assert code == 0, said
    assert "continuing with 2 of 3 processes" in said
    assert weights(running.run) == undisturbed
    assert [world["size"] for world in result(running.run)["worlds"]] == [3, 2]
    samebits("verify", running.run, "--all", cwd=tmp_path)


SEVERAL_BUCKETS = """
import samebits.parallel.reduce as _reduce
import samebits.parallel.exchange.tree_all_reduce as _tree

_reduce.BUCKET_BYTES, _tree.SMALL_BYTES = 300, 100
"""
IN_THREADS = f"""{SEVERAL_BUCKETS}
import samebits.parallel.reduce as _sum

_sum.are_worth_threads = lambda world: world.gloo_group is not None  # as between machines
"""


@pytest.mark.lab
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        pytest.param(["precision=fp16"], "", id="loss scale"),
        pytest.param(["optim.ema=0.9", "loader.num_workers=1"], "", id="moving average and reading processes"),
        pytest.param([], SEVERAL_BUCKETS, id="several buckets in two rounds"),
        pytest.param([], IN_THREADS, id="summed by threads"),
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_all_state_survives_a_lost_process(settings: list[str], more: str, victim: int, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(TINY.read_text(encoding="utf-8") + more, encoding="utf-8")
    samebits("train", recipe, *SETTINGS, *settings, "--procs", 1, "--run-dir", tmp_path / "alone", cwd=tmp_path)
    with job(tmp_path, *IN_STEP, *settings, "--procs", 3, "--max-restarts", 5, source=recipe) as running:
        lose(running, Loss(3, (victim,), 5, 0.02, again_s=0.3))
        code, said = running.ended()
    assert code == 0, said
    assert "from the last checkpoint" not in said
    assert weights(running.run) == weights(tmp_path / "alone")


@pytest.mark.full
def test_a_new_process_waits_for_a_validation_of_more_than_ten_seconds(undisturbed: str, tmp_path: Path) -> None:
    slow = ("data.slow_s=0", "data.eval_slow_s=3.5")
    with job(tmp_path, *IN_STEP, *slow, "--procs", 2, "--max-restarts", 5) as running:
        lose(running, Loss(2, (1,), STEPS_PER_EPOCH))
        code, said = running.ended()
    assert code == 0, said
    assert "could not join" not in said
    assert "restart 2" not in said
    assert weights(running.run) == undisturbed


@pytest.mark.full
def test_a_run_ends_at_once_while_a_new_process_joins(undisturbed: str, tmp_path: Path) -> None:
    with job(tmp_path, *IN_STEP, "data.slow_s=0", "data.eval_slow_s=1.2", "--procs", 2, "--max-restarts", 1) as running:
        lose(running, Loss(2, (1,), 34))
        wait_until(lambda: any((tmp_path / "tmp").glob("*/*/ready-2")), WAIT_S)
        wait_until(lambda: (running.run / "result.json").exists(), WAIT_S)
        code, said = running.ended()
    assert code == 0, said
    assert weights(running.run) == undisturbed
    log = (running.run / "logs" / "rank-1.log").read_text()
    assert "another process has completed the run" in log, "the new process waited until it gave up"


@pytest.mark.parametrize("delay_s", [0.3, *(pytest.param(0.1 * tenth, marks=pytest.mark.lab) for tenth in range(12))])
def test_a_stop_while_the_run_is_being_built_ends_the_command(delay_s: float, tmp_path: Path) -> None:
    with job(tmp_path, *IN_STEP, "--procs", 2, "--max-restarts", 3) as running:
        wait_until(lambda: len(running.workers()) == 2, WAIT_S)
        time.sleep(delay_s)
        running.process.send_signal(signal.SIGTERM)
        code, said = running.ended()
        assert code == 128 + signal.SIGTERM, said
        assert running.left() == []


@pytest.mark.full
def test_a_run_that_cannot_recover_in_the_step_restarts_and_reports_why(tmp_path: Path) -> None:
    with job(tmp_path, *IN_STEP, "batch_norm=sync", "--procs", 2, "--max-restarts", 1) as running:
        lose(running, Loss(2, (1,), 5))
        code, said = running.ended()
    assert code == 0, said
    assert "cluster.recovery=in_step does not work with batch_norm=sync" in said
    assert "restart 1 of 1" in said
