"""Replay the availability of spot machines with real kills and returns: goodput of Lockstep and of hand-written DDP.

    python -m benchmarks.spot                                       # 4 machines, 3 minutes each
    python -m benchmarks.spot --seconds 600 --change-s 60 --seed 2

Each machine is a launcher with one process, `--nodes 1:N` with cluster.recovery=in_step. It is lost by SIGKILL of both,
without notice, and returns by the same command. The trace is synthetic (`spot_trace.py`): its default has 70% of the
machines up, and a change of one of them each 20 s. DDP is started again by torchrun at each change, with the number of
processes that are up, from its last checkpoint, which a program that watches the machines would do.

A step sleeps in proportion to the samples of a process, so that processes on few cores are as fast as on machines of
their own. Goodput is the number of samples in the result at the end of the trace, relative to undisturbed runs of the
same tool on as many machines for the same time; they are measured first. Lockstep's run is then completed at full
speed, and must have the weights of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.spot_trace import Change, goodput, intervals, make_trace

ROOT = Path(__file__).resolve().parents[1]
GLOBAL_BATCH, MICRO_BATCH = 48, 4
SAMPLE_S = 0.025
RATE_STEPS = 20  # of an undisturbed run
LIMIT_S = 120.0


class Tool(Protocol):
    """A job of one tool."""

    def change(self, up: set[int], change: Change) -> None:
        """React to a machine that was lost or returned; `up` are those that are there now."""

    def steps(self) -> int:
        """Return the last step whose result is not lost."""

    def close(self) -> None:
        """End all processes."""


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                with suppress(psutil.NoSuchProcess):
                    # It frees shared memory of the others, as a machine that is lost needs nobody to.
                    if not any("resource_tracker" in word for word in each.cmdline()):
                        each.kill()
        process.wait()


class Lockstep:
    """A launcher for each machine.

    Args:
        folder: Files of the job.
        num_steps: Steps of the run.
    """

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._folder, self._port = folder, _free_port()
        folder.mkdir()
        self.slow = folder / "slow"
        self.slow.touch()
        self.settings = (
            "data.num_samples=481", "epochs=1000", f"max_steps={num_steps}", "eval_every=100000 steps",
            "checkpoint.every=100000 steps", "report.every_steps=1", "report.tensorboard=false",
            f"global_batch={GLOBAL_BATCH}", f"micro_batch={MICRO_BATCH}",
        )  # fmt: skip
        self._given = (
            "cluster.recovery=in_step", "cluster.node_timeout_s=2", "cluster.last_call_s=2",
            f"data.slow_s={MICRO_BATCH * SAMPLE_S}", f"data.slow_while={self.slow}",
        )  # fmt: skip
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    def change(self, up: set[int], change: Change) -> None:
        """Kill or start a launcher with its process."""
        if not change.is_up:
            _kill([self.launchers.pop(change.slot)])
            return
        tmp = self._folder / f"tmp{change.slot}-{change.at_s:.0f}"
        tmp.mkdir()
        join = ["--nodes", "1:9", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--max-restarts", "9"]
        with (self._folder / f"said-{change.slot}").open("ab") as said:
            self.launchers[change.slot] = subprocess.Popen(
                [sys.executable, "-m", "lockstep", "train", str(ROOT / "tests" / "e2e" / "tiny_recipe.py"),
                 *self.settings, *self._given, "--procs", "1", *join, "--run-dir", str(self._folder / "run")],
                cwd=self._folder, env={**_environ(), "TMPDIR": str(tmp)}, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip

    def steps(self) -> int:
        """Return the number of recorded steps."""
        path = self._folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b'"kind": "train"') if path.exists() else 0

    def finish(self) -> str:
        """Let the machines that are up complete the run at full speed; return the hash of its weights."""
        self.slow.unlink()
        codes = [launcher.wait(LIMIT_S) for launcher in self.launchers.values()]
        if any(codes):
            raise RuntimeError(f"exit codes {codes}, see {self._folder}")
        return _hash(self._folder / "run")

    def alone(self) -> str:
        """Train with one process; return the hash of its weights."""
        command = ["train", str(ROOT / "tests" / "e2e" / "tiny_recipe.py"), *self.settings]
        run = self._folder / "alone"
        subprocess.run(
            [sys.executable, "-m", "lockstep", *command, "--procs", "1", "--run-dir", str(run)],
            cwd=self._folder, env=_environ(), check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return _hash(run)

    def close(self) -> None:
        """End all processes."""
        _kill([*self.launchers.values()])


class Ddp:
    """torchrun, started again at each change.

    Args:
        folder: Files of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._run: list[subprocess.Popen[bytes]] = []

    def change(self, up: set[int], change: Change) -> None:
        """Kill all processes and start as many as there are machines."""
        _kill(self._run)
        with (self._folder / "said").open("ab") as said:
            self._run = [
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(up)),
                     str(ROOT / "benchmarks" / "peers" / "spot_ddp.py")],
                    env={**_environ(), "SPOT_FOLDER": str(self._folder)}, stdout=said, stderr=said,
                    start_new_session=True,
                )
            ]  # fmt: skip

    def steps(self) -> int:
        """Return the last step, which counts even if it is not in a checkpoint yet."""
        path = self._folder / "steps"
        lines = path.read_text(encoding="utf-8").split() if path.exists() else []
        return int(lines[-1]) if lines else 0

    def close(self) -> None:
        """End all processes."""
        _kill(self._run)


@contextmanager
def running(tool: Tool, first: list[Change]) -> Iterator[set[int]]:
    """Start the first machines of a trace, wait for the first step, and end all processes at the end."""
    up = {change.slot for change in first}
    try:
        for change in first if isinstance(tool, Lockstep) else first[:1]:
            tool.change(up, change)
        _until(tool, 1)
        yield up
    finally:
        tool.close()


def measure_rate(tool: Tool, size: int) -> float:
    """Return the samples per second of an undisturbed run."""
    with running(tool, [Change(0.0, slot, True) for slot in range(size)]):
        _until(tool, 3)
        began, before = time.monotonic(), tool.steps()
        _until(tool, before + RATE_STEPS)
        return GLOBAL_BATCH * (tool.steps() - before) / (time.monotonic() - began)


def replay(tool: Tool, trace: list[Change], seconds: float) -> tuple[int, str]:
    """Play a trace from the first step on; return the samples at its end, and a hash of the completed run."""
    with running(tool, [change for change in trace if change.at_s == 0.0]) as up:
        began, before = time.monotonic(), tool.steps()
        for change in trace:
            if change.at_s > 0.0:
                time.sleep(max(0.0, began + change.at_s - time.monotonic()))
                up ^= {change.slot}
                tool.change(up, change)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        samples = GLOBAL_BATCH * (tool.steps() - before)
        return samples, tool.finish() if isinstance(tool, Lockstep) else ""


def main() -> int:
    """Print a row for each tool; the exit code tells whether Lockstep's weights are those of one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=4, help="machines")
    parser.add_argument("--seconds", type=float, default=180.0, help="length of the trace")
    parser.add_argument("--availability", type=float, default=0.7, help="mean share of machines that are up")
    parser.add_argument("--change-s", type=float, default=20.0, help="mean time between two changes")
    parser.add_argument("--seed", type=int, default=1, help="repeats a trace")
    parser.add_argument("--tools", nargs="*", default=["Lockstep", "DDP"], choices=["Lockstep", "DDP"])
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    trace = make_trace(given.seed, given.slots, given.seconds, given.availability, given.change_s)
    parts = intervals(trace, given.seconds)
    share = sum(length * up for length, up in parts) / given.seconds / given.slots
    losses = sum(not change.is_up for change in trace)
    returns = sum(change.is_up and change.at_s > 0 for change in trace)
    print(f"{given.slots} machines for {given.seconds:.0f} s: {share:.0%} up, {losses} losses, {returns} returns")
    num_steps = int(given.seconds / (GLOBAL_BATCH * SAMPLE_S / given.slots)) + 20
    is_equal = True
    rows = []
    with tempfile.TemporaryDirectory(prefix="s") as name:
        place = Path(name)
        makers: dict[str, Callable[[Path], Tool]] = {"Lockstep": lambda folder: Lockstep(folder, num_steps), "DDP": Ddp}
        for tool in given.tools:
            make = makers[tool]
            sizes = sorted({up for _, up in parts})
            rates = {size: measure_rate(make(place / f"{tool}{size}"), size) for size in sizes}
            job = make(place / tool)
            samples, found = replay(job, trace, given.seconds)
            rows.append((tool, samples, goodput(samples, trace, given.seconds, lambda size, at=rates: at[size])))  # type: ignore[misc]
            print(
                f"{tool}: undisturbed", ", ".join(f"{size}: {rate:.0f}/s" for size, rate in rates.items()), flush=True
            )
            if isinstance(job, Lockstep):
                is_equal = found == job.alone()
    print("\n| | samples at the end | goodput |\n|---|---|---|")
    for tool, samples, value in rows:
        print(f"| {tool} | {samples:,} | {value:.1%} |")
    if "Lockstep" in given.tools:
        print(f"weights of Lockstep: {'those of one process' if is_equal else 'DIFFERENT'}")
    return 0 if is_equal else 1


def _until(tool: Tool, step: int) -> None:
    end = time.monotonic() + LIMIT_S
    while tool.steps() < step:
        if time.monotonic() > end:
            raise RuntimeError(f"{type(tool).__name__} did not come to step {step}")
        time.sleep(0.01)


def _hash(run: Path) -> str:
    return str(json.loads((run / "result.json").read_text(encoding="utf-8"))["weights_sha256"])


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
