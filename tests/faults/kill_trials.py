"""One trial of benchmarks/kills.py: a small run, the losses that a seed draws, and what is checked afterwards."""

import contextlib
import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.faults import STEPS_PER_EPOCH, WAIT_S, Job, job
from tests.faults.kill_watch import Watch
from tests.runs import records, result

NUM_STEPS = 2 * STEPS_PER_EPOCH
# How often each moment is drawn.
MOMENTS = {"step": 3, "together": 3, "recovery": 3, "joining": 3, "save": 2, "evaluation": 2, "end": 1, "start": 1}
HOW = {"kill": 6, "stop": 3, "pause": 1}


@dataclass(frozen=True)
class Trial:
    """What is done to a run; all of it follows from the seed.

    Attributes:
        seed: Repeats this trial alone.
        size: Processes.
        moment: step, together (two or more at once), recovery (one more while the others recover), joining (one while a
            replacement joins), save, evaluation, end (after the last step) or start (while the run is being built).
        how: kill (SIGKILL), stop (SIGSTOP) or pause (SIGSTOP, and SIGCONT `pause_s` later).
        order: Places of the processes that may be lost, in this order; the remaining one always survives.
        num_together: How many are lost at once.
        step: Not before this step.
        delay_s: And so much later, seconds.
        again_s: Delay of the second loss, after the event that it waits for.
        pause_s: Time between SIGSTOP and SIGCONT.
        hits_new: The second loss is that of the replacement, if there is one.
        waits_for_join: The run is slow until the replacements have joined.
    """

    seed: int
    size: int
    moment: str
    how: str
    order: tuple[int, ...]
    num_together: int
    step: int
    delay_s: float
    again_s: float
    pause_s: float
    hits_new: bool
    waits_for_join: bool

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.how} of {self.size}, {self.moment}, step {self.step} + {self.delay_s:.3f} s"


@dataclass
class Outcome:
    """What a trial showed.

    Attributes:
        trial: Trial, or NodeTrial of `benchmarks/node_trials.py`.
        faults: What was wrong; empty if nothing was.
        num_repeated: Steps that were done again.
        stages_s: From the last loss until a launcher has named the members of the next world, its group continues,
            and its first step is done, seconds; empty: no step followed.
        num_lost: Processes that were lost.
        seconds: Duration of the trial.
        output: The command's output.
    """

    trial: Any  # Trial or NodeTrial
    faults: list[str] = field(default_factory=list)
    num_repeated: int = 0
    stages_s: tuple[float, float, float] | tuple[()] = ()
    num_lost: int = 0
    seconds: float = 0.0
    output: str = ""


def draw(seed: int) -> Trial:
    """Draw a trial."""
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4, 5, 6])
    moment = rng.choices([*MOMENTS], [*MOMENTS.values()])[0]
    order = rng.sample(range(size), size)[1:]
    return Trial(
        seed=seed,
        size=size,
        moment=moment,
        how=rng.choices([*HOW], [*HOW.values()])[0],
        order=tuple(order),
        num_together=min(rng.choice([2, 2, 3, size]), len(order)) if moment == "together" else 1,
        step={"evaluation": STEPS_PER_EPOCH, "end": NUM_STEPS, "start": 0}.get(moment, rng.randint(1, NUM_STEPS - 6)),
        delay_s=rng.random() * {"start": 2.0, "save": 0.004}.get(moment, 0.3 if moment == "evaluation" else 0.15),
        again_s=rng.random() * (0.4 if moment == "recovery" else 0.15),
        pause_s=rng.uniform(0.05, 0.5),
        hits_new=rng.random() < 0.5 and moment == "joining",
        waits_for_join=rng.random() < 0.5,
    )


def play(trial: Trial, folder: Path, settings: list[str], wanted: str) -> Outcome:
    """Run a trial."""
    outcome, began = Outcome(trial), time.monotonic()
    slow = folder / "slow"
    slow.touch()
    # A replacement needs seconds until it can join; else a step takes 60 ms, which the next step's time contains.
    slow_s = 0.03 if trial.moment == "joining" or trial.waits_for_join else 0.01
    given = ["cluster.recovery=in_step", f"data.slow_while={slow}", f"data.slow_s={slow_s * trial.size:.2f}"]
    given += ["data.eval_slow_s=0.05", *settings, "--procs", str(trial.size), "--max-restarts", "8"]
    try:
        with job(folder, *given) as running, Watch(running) as watch:
            losses = Losses(trial, running, watch)
            losses.cause()
            slow.unlink()
            code, outcome.output = running.ended()
            left = running.left()
        outcome.faults += [f"exit code {code}"] * (code != 0) + left
        _check(outcome, losses, watch, running, wanted)
    except Exception as error:
        outcome.faults.append(f"{type(error).__name__}: {str(error)[:300]}")
    outcome.seconds = time.monotonic() - began
    return outcome


class Losses:
    """Causes the losses of a trial.

    Attributes:
        lost: Process ids of the lost processes.
        pids: Process ids of the first processes.
        last_at: When the last signal was sent.
        last_how: What the last signal does.
    """

    def __init__(self, trial: Trial, running: Job, watch: Watch) -> None:
        self._trial, self._running, self._watch = trial, running, watch
        self.lost: set[int] = set()
        self.pids: list[int] = []
        self.last_at = 0.0

    def cause(self) -> None:
        """Wait for the moments, and send the signals."""
        trial, running, watch = self._trial, self._running, self._watch
        workers = self._until(lambda: (found := running.workers()) and len(found) >= trial.size and found)
        if not workers:
            return
        self.pids = [worker.pid for worker in workers]
        self._until(lambda: watch.steps[-1][1] >= trial.step)
        if trial.moment == "save":
            self._until(lambda: any(True for _ in (running.run / "checkpoints").glob("*.partial")), 0.0005)
        time.sleep(trial.delay_s)
        urgent, number = watch.urgent(), watch.number()
        self._lose([workers[place] for place in trial.order[: trial.num_together]], trial.how)
        rest = [workers[place] for place in trial.order[trial.num_together :]]
        if trial.moment == "recovery":
            self._until(lambda: watch.urgent() > urgent, 0.001, 2.0)
            self._again(rest)
        elif trial.moment == "joining":
            # Either just before the replacement is admitted, or while it joins.
            self._until(lambda: self._is_ready(trial.size) or watch.number() > watch.urgent(), 0.001)
            self._again(rest)
        if trial.waits_for_join:
            self._until(lambda: watch.number() > max(number, watch.urgent()), 0.005)
            before = watch.steps[-1][1]
            self._until(lambda: watch.steps[-1][1] > before + 1)

    def _again(self, rest: list[psutil.Process]) -> None:
        time.sleep(self._trial.again_s)
        new = [worker for worker in self._running.workers() if worker.pid not in self.pids]
        victims = new[:1] if (self._trial.hits_new and new) or not rest else rest[:1]
        self._lose(victims, "kill")

    def _lose(self, victims: list[psutil.Process], how: str) -> None:
        if not victims or (self._watch.steps[-1][1] >= NUM_STEPS and self._trial.moment != "end"):
            return
        self.last_at = time.monotonic()
        for victim in victims:
            _send(victim, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            self.lost.add(victim.pid)
        if how == "pause":
            time.sleep(self._trial.pause_s)
            for victim in victims:
                _send(victim, signal.SIGCONT)

    def _is_ready(self, number: int) -> bool:
        return any(True for _ in (self._running.folder / "tmp").glob(f"*/*/ready-{number}"))

    def _until(self, condition: Any, pause_s: float = 0.005, limit_s: float = WAIT_S) -> Any:
        """Wait for a condition, the end of the run or that of its last step."""
        end = time.monotonic() + limit_s
        while not (found := condition()) and time.monotonic() < end and self._running.process.poll() is None:
            if self._watch.steps[-1][1] >= NUM_STEPS:
                break
            time.sleep(pause_s)
        return found


def _check(outcome: Outcome, losses: Losses, watch: Watch, running: Job, wanted: str) -> None:
    trial, output = outcome.trial, outcome.output
    outcome.num_repeated, outcome.num_lost = watch.num_repeated, output.count("was killed by signal")
    outcome.stages_s = watch.stages_s(losses.last_at) if trial.how != "pause" and losses.last_at else ()
    found = result(running.run)
    if found["weights_sha256"] != wanted:
        outcome.faults.append(f"other weights: {found['weights_sha256'][:8]}, not {wanted[:8]}")
    steps = [record["step"] for record in records(running.run, "train")]
    if steps != [*range(1, NUM_STEPS + 1)]:
        outcome.faults.append(f"records of steps {steps}")
    evaluations = [record["step"] for record in records(running.run, "eval")]
    if evaluations != [STEPS_PER_EPOCH, NUM_STEPS]:
        outcome.faults.append(f"records of validations after {evaluations}")
    if outcome.num_repeated:
        outcome.faults.append(f"{outcome.num_repeated} steps repeated")
    if trial.moment != "start" and "from the last checkpoint" in output:
        outcome.faults.append("all processes restarted")
    first, lost = {*losses.pids}, losses.lost
    killed = {int(pid) for pid in re.findall(r"pid (\d+)\) (?:was killed|was stopped|could not|failed)", output)}
    if trial.moment != "start" and killed & first - lost:
        outcome.faults.append(f"survivors did not keep their processes: {killed & first - lost}")
    ports = {epoch["port"] for _, epoch in watch.epochs}
    for found in psutil.net_connections("tcp"):
        # Another program may have been given the port meanwhile.
        if (
            found.status == psutil.CONN_LISTEN
            and found.laddr.port in ports
            and _session(found.pid) == running.process.pid
        ):
            outcome.faults.append(f"port {found.laddr.port} is open")


def _session(pid: int | None) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid) if pid else 0
    return 0


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
