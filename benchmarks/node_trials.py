"""One trial of `benchmarks/kills.py --nodes`: several launchers on this machine, and the loss of processes or nodes."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.hosts import Host
from tests.faults.faults import Job
from tests.faults.kill_trials import Outcome
from tests.faults.kill_watch import Watch
from tests.faults.test_nodes import kill_node, nodes, said
from tests.runs import processes_with, records, result, weights

NUM_STEPS = 34
WAIT_S = 120.0
NODE_TIMEOUT_S = 2.0
LOSSES = ("process", "stopped", "node", "seemed")


@dataclass(frozen=True)
class NodeTrial:
    """What is done to a run; all of it follows from the seed.

    Attributes:
        seed: Repeats this trial alone.
        num_nodes: Launchers, with one process each.
        what: process (kill -9 of one process, which its launcher replaces), stopped (SIGSTOP of one process), node
            (kill -9 of a launcher and its process) or seemed (SIGSTOP of both until some time after they count as lost:
            they must not end the run, and may join it again).
        victims: Numbers of the nodes, in the order of their loss; at least one remains whole. Node 0 serves the
            rendezvous, so it loses only processes.
        step: Not before this step.
        delay_s: And so much later, seconds.
        again_s: Delay of the second loss, and of SIGCONT after a node counts as lost, seconds.
    """

    seed: int
    num_nodes: int
    what: str
    victims: tuple[int, ...]
    step: int
    delay_s: float
    again_s: float

    def __str__(self) -> str:
        places = " and ".join(map(str, self.victims))
        return f"seed {self.seed}: {self.what} {places} of {self.num_nodes}, step {self.step} + {self.delay_s:.3f} s"


def draw_nodes(seed: int, sizes: list[int]) -> NodeTrial:
    """Draw a trial."""
    rng = random.Random(seed)
    size = rng.choice(sizes)
    order = rng.sample(range(size), size)
    what = rng.choice(LOSSES)
    if what in ("node", "seemed"):
        order.remove(0)
    return NodeTrial(
        seed=seed, num_nodes=size, what=what, victims=tuple(order[: rng.randint(1, size - 1)]),
        step=rng.randint(1, 20), delay_s=0.15 * rng.random(), again_s=rng.choice([0.0, 0.4, 3.0]) * rng.random(),
    )  # fmt: skip


def play_nodes(
    trial: NodeTrial, folder: Path, settings: list[str], wanted: str, places: Sequence[Host] = ()
) -> Outcome:
    """Run a trial."""
    outcome, began = Outcome(trial), time.monotonic()
    folder.mkdir()
    slow, names = folder / "slow", [f"n{number}" for number in range(trial.num_nodes)]
    slow.touch()
    given = ["cluster.recovery=in_step", f"cluster.node_timeout_s={NODE_TIMEOUT_S}", "cluster.last_call_s=60"]
    given += [f"data.slow_while={slow}", "data.slow_s=0.1", *settings]
    try:
        with nodes(folder, *given, "--nodes", f"1:{trial.num_nodes}", "--max-restarts", "4", places=places) as begin:
            jobs = [begin(name) for name in names]
            whole = min({*range(trial.num_nodes)} - {*trial.victims})
            with Watch(jobs[0], folder / names[whole] / "tmp") as watch:
                survivors, at = _lose(outcome, jobs, watch)
                kept = all(psutil.pid_exists(pid) for pid in survivors)
                slow.unlink()
                remaining = [job for n, job in enumerate(jobs) if trial.what != "node" or n not in trial.victims]
                codes = [job.process.wait(WAIT_S) for job in remaining]
                outcome.num_repeated, outcome.stages_s = watch.num_repeated, watch.stages_s(at)
        outcome.faults += [f"exit codes {codes}"] * any(codes)
        outcome.faults += ["survivors did not keep their processes"] * (not kept)
        _check(outcome, folder / "run", wanted)
    except Exception as error:
        outcome.faults.append(f"{type(error).__name__}: {str(error)[:300]}")
    outcome.output = "\n".join(f"--- {name}\n{said(folder, name)}" for name in names if (folder / name).is_dir())
    outcome.seconds = time.monotonic() - began
    return outcome


def _lose(outcome: Outcome, jobs: list[Job], watch: Watch) -> tuple[list[int], float]:
    """Cause the losses and wait for the second step after them; return the survivors' process ids, and when it was."""
    trial = outcome.trial
    _until(lambda: watch.steps[-1][1] >= trial.step)
    workers = {number: [worker.pid for worker in job.workers()] for number, job in enumerate(jobs)}
    time.sleep(trial.delay_s)
    for place, number in enumerate(trial.victims):
        time.sleep(trial.again_s if place else 0.0)
        at = time.monotonic()
        if trial.what == "node":
            kill_node(jobs[number])
        elif trial.what == "seemed":
            _signal_node(jobs[number], signal.SIGSTOP)
        else:
            for worker in jobs[number].workers():
                worker.send_signal(signal.SIGKILL if trial.what == "process" else signal.SIGSTOP)
    before = watch.steps[-1][1]
    if trial.what == "seemed":
        # The others may wait for it: a process that still holds the lock of the run folder could write there.
        time.sleep(1.5 * NODE_TIMEOUT_S + trial.again_s)
        for number in trial.victims:
            _signal_node(jobs[number], signal.SIGCONT)
    # One step may have been complete already, and not recorded.
    if before + 2 < NUM_STEPS:
        _until(lambda: watch.steps[-1][1] >= before + 2)
    return [pid for number, pids in workers.items() if number not in trial.victims for pid in pids], at


def _signal_node(job: Job, number: signal.Signals) -> None:
    """Send a signal to a launcher and all below it."""
    launcher = psutil.Process(job.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        process.send_signal(number)


def _until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not (found := bool(condition())) and time.monotonic() < end:
        time.sleep(0.005)
    return found


def _check(outcome: Outcome, run: Path, wanted: str) -> None:
    if (found := weights(run)) != wanted:
        outcome.faults.append(f"other weights: {found[:8]}, not {wanted[:8]}")
    steps = [record["step"] for record in records(run, "train")]
    if steps != [*range(1, NUM_STEPS + 1)] or result(run)["steps"] != NUM_STEPS:
        outcome.faults.append(f"records of steps {steps}")
    if outcome.num_repeated:
        outcome.faults.append(f"{outcome.num_repeated} steps repeated")
    end = time.monotonic() + 30.0
    while (left := processes_with(str(run.parent))) and time.monotonic() < end:
        time.sleep(0.05)
    left_files = {*os.listdir(run)} & {".rendezvous-key"}
    outcome.faults += [f"processes left: {left}"] * bool(left) + [f"files left: {left_files}"] * bool(left_files)
