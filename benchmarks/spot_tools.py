"""Jobs of the tools that `benchmarks/spot.py` compares: how they are started, and how they react to a change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.spot_trace import Change
from samebits.cluster.address import ReservedPort, port_holder
from tests.runs import PYTHON_PATH, ROOT, TINY, kill_machine, records, wait_until, weights

GLOBAL_BATCH, MICRO_BATCH = 48, 4
NUM_SAMPLES = 480  # a whole number of global batches, so that each step has as many samples
SAMPLE_S = 0.025
LIMIT_S = 120.0
# Jobs that torchrun starts: the script, and the package with its requirement for pip.
SCRIPTS = {
    "DDP": ("spot_ddp.py", "", ""),
    "Lightning": ("spot_lightning.py", "lightning", "lightning>=2.6.6"),
    "Accelerate": ("spot_accelerate.py", "accelerate", "accelerate>=1.0"),
}
TOOLS = ("Samebits", *SCRIPTS)


class Tool(Protocol):
    """A job of one tool."""

    def change(self, up: set[int], changes: Sequence[Change]) -> None:
        """React to machines that were lost or returned at the same time; `up` are those that are there now."""

    def steps(self) -> int:
        """Return the last step whose result is not lost."""

    def repeated(self) -> int:
        """Return how many steps were computed again."""

    def close(self) -> None:
        """End all processes."""


class Samebits:
    """A launcher for each machine."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._folder, self._num_started = folder, 0
        folder.mkdir()
        self._reserved = ReservedPort()
        self._port = self._reserved.renew()
        self.slow = folder / "slow"
        self.slow.touch()
        self._settings = (
            f"data.num_samples={NUM_SAMPLES}", "epochs=1000", f"max_steps={num_steps}", "eval_every=100000 steps",
            "checkpoint.every=10 steps", "report.every_steps=1", "report.tensorboard=false",
            f"global_batch={GLOBAL_BATCH}", f"micro_batch={MICRO_BATCH}",
        )  # fmt: skip
        self._given = (
            "cluster.recovery=in_step", "cluster.node_timeout_s=2", "cluster.last_call_s=2",
            f"data.slow_sample_s={SAMPLE_S}", f"data.slow_while={self.slow}",
        )  # fmt: skip
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self._server = -1  # the machine at which the launchers meet

    def change(self, up: set[int], changes: Sequence[Change]) -> None:
        """Kill or start launchers with their processes."""
        lost = [change.slot for change in changes if not change.is_up]
        begun = [change.slot for change in changes if change.is_up]
        if self._server in lost:  # the others end without it, and start again from the last checkpoint
            lost, begun = [*self.launchers], sorted(up)
        kill([self.launchers.pop(slot) for slot in lost])
        for slot in begun:
            is_first = not self.launchers
            self._start(slot)
            if is_first:
                self._server = slot
                wait_until(lambda: port_holder(self._port) != "", LIMIT_S)

    def _start(self, slot: int) -> None:
        self._num_started += 1
        tmp = self._folder / f"tmp{self._num_started}"
        tmp.mkdir()
        join = ["--nodes", "1:9", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--max-restarts", "9"]
        with (self._folder / f"said-{slot}").open("ab") as said:
            self.launchers[slot] = subprocess.Popen(
                [sys.executable, "-m", "samebits", "train", str(TINY), *self._settings, *self._given,
                 "--procs", "1", *join, "--run-dir", str(self._folder / "run"), "--resume", "auto"],
                cwd=self._folder, env={**_environ(), "TMPDIR": str(tmp)}, stdout=said, stderr=said,
                start_new_session=True,
            )  # fmt: skip

    def recorded(self) -> list[int]:
        """Return the steps that the run recorded, in this order."""
        return [record["step"] for record in records(self._folder / "run", "train")]

    def steps(self) -> int:
        """Return the number of recorded steps."""
        return len(self.recorded())

    def repeated(self) -> int:
        """Return how many steps were recorded again."""
        return len(self.recorded()) - len(set(self.recorded()))

    def finish(self) -> str:
        """Let the machines that are up complete the run at full speed; return the hash of its weights."""
        self.slow.unlink()
        codes = [launcher.wait(LIMIT_S) for launcher in self.launchers.values()]
        if any(codes):
            raise RuntimeError(f"exit codes {codes}, see {self._folder}")
        return weights(self._folder / "run")

    def alone(self) -> str:
        """Train with one process; return the hash of its weights."""
        run = self._folder / "alone"
        subprocess.run(
            [sys.executable, "-m", "samebits", "train", str(TINY), *self._settings, "--procs", "1",
             "--run-dir", str(run)],
            cwd=self._folder, env=_environ(), check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return weights(run)

    def close(self) -> None:
        """End all processes."""
        kill([*self.launchers.values()])
        self._reserved.close()


class Restarted:
    """A job that torchrun starts again at each change, from its last checkpoint."""

    def __init__(self, folder: Path, script: str, python: str) -> None:
        self._folder, self._script, self._python = folder, script, python
        folder.mkdir()
        self._run: list[subprocess.Popen[bytes]] = []

    def change(self, up: set[int], changes: Sequence[Change]) -> None:
        """Kill all processes and start as many as there are machines."""
        self._check()
        kill(self._run)
        variables = {
            "SPOT_FOLDER": str(self._folder), "SPOT_GLOBAL_BATCH": str(GLOBAL_BATCH),
            "SPOT_NUM_SAMPLES": str(NUM_SAMPLES), "SPOT_SAMPLE_S": str(SAMPLE_S),
        }  # fmt: skip
        with (self._folder / "said").open("ab") as said:
            self._run = [
                subprocess.Popen(
                    [self._python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(up)),
                     str(ROOT / "benchmarks" / "peers" / self._script)],
                    cwd=self._folder, env={**_environ(), **variables}, stdout=said, stderr=said,
                    start_new_session=True,
                )
            ]  # fmt: skip

    def _noted(self) -> list[int]:
        path = self._folder / "steps"
        return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []

    def _check(self) -> None:
        if any(run.poll() is not None for run in self._run):
            said = (self._folder / "said").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{self._script} ended by itself; its last output:\n{said[-3000:]}")

    def steps(self) -> int:
        """Return the last step, which counts even if it is not in a checkpoint yet."""
        self._check()
        return (self._noted() or [0])[-1]

    def repeated(self) -> int:
        """Return how many steps were computed again."""
        return len(self._noted()) - len(set(self._noted()))

    def close(self) -> None:
        """End all processes."""
        kill(self._run)


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill processes and their children, as the loss of their machines does."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            kill_machine(process.pid)
        process.wait()


def is_installed(package: str, python: str) -> bool:
    """Return whether an interpreter finds a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def _environ() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }
