"""Jobs for benchmarks/faults.py: how each tool is started, and what an observer sees of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
PEERS = Path(__file__).resolve().parent / "peers"
SCRIPTS = {
    "DDP by hand": "fault_by_hand.py", "Lightning": "fault_lightning.py", "Accelerate": "fault_accelerate.py",
}  # fmt: skip
HANG_S = 15
# What a person would take for news of a fault. Warnings of the start don't count: only lines after the fault do.
NEWS = re.compile(
    r"error|fail|signal|kill|hang|not finite|differ|traceback|sigterm|stopp|torn|altered|missing|waiting|no space|"
    r"refused",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Setting:
    """Common settings of all jobs."""

    peers_python: str
    limit_s: float


@dataclass
class Outcome:
    """The outcome of a fault. Times are in seconds after it. None: did not happen."""

    noticed_s: float | None = None
    said: str = ""
    code: int | None = None
    next_step_s: float | None = None
    redone: int | None = None
    left: int | None = None
    same: bool | None = None
    remark: str = ""

    def cells(self) -> list[str]:
        """Return a cell of the table."""
        return [
            "not" if self.noticed_s is None else f"{self.noticed_s:.1f} s",
            self.said.replace("|", "/")[:150] or "nothing",
            "had to be ended" if self.code is None else str(self.code),
            "-" if self.next_step_s is None else f"{self.next_step_s:.1f} s",
            "-" if self.redone is None else str(self.redone),
            "-" if self.left is None else str(self.left),
            self.remark or {None: "-", True: "yes", False: "no"}[self.same],
        ]


def commands(tool: str, job: Job, form: str) -> list[list[str]]:
    """Return the commands of a user. `form`: one, two (a command per rank) or first (rank 0's only)."""
    python = sys.executable if tool in ("Samebits", "DDP by hand") else job.setting.peers_python
    if tool == "Samebits":
        base = [sys.executable, "-m", "samebits", "train", str(PEERS / "fault_recipe.py")]
        base += ["--run-dir", str(job.data / "run"), "--resume", "auto", "device=cpu", f"watch.hang_timeout_s={HANG_S}"]
        if form == "one":
            return [[*base, "--procs", "2", "--max-restarts", "3"]]
        join = ["--init", f"tcp://127.0.0.1:{job.port}", "--world-size", "2", "--rank"]
        ranks = [[*base, *join, "0", "optim.lr=0.05"], [*base, *join, "1", "optim.lr=0.1"]]
        return ranks if form == "two" else ranks[:1]
    run = [python, "-m", "torch.distributed.run", "--max-restarts=3"]
    script = str(PEERS / SCRIPTS[tool])
    if form == "first":
        return [
            [
                *run,
                "--nnodes=2",
                "--nproc-per-node=1",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{job.port}",
                script,
            ]
        ]
    return [[*run, "--standalone", "--nproc-per-node=2", script]]


@dataclass
class Job:
    """A job of one tool: its commands, recorded steps and output."""

    tool: str
    folder: Path
    setting: Setting
    make: Callable[[str, Job, str], list[list[str]]]
    data: Path = field(init=False)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = 0
    fault_at: float = 0.0
    said_before: int = 0

    def __post_init__(self) -> None:
        self.data = self.folder / "data"
        self.data.mkdir(parents=True, exist_ok=True)

    @property
    def log(self) -> Path:
        """What it has said."""
        return self.folder / "said.txt"

    def start(
        self, form: str = "one", fault: str = "", wrap: Callable[[int, list[str]], list[str]] | None = None
    ) -> None:
        """Start the job."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environ = {
            **os.environ, "OMP_NUM_THREADS": "1", "FAULT_KIND": fault, "FAULT_FOLDER": str(self.data), "NO_COLOR": "1",
            "PYTHONPATH": f"{PYTHON_PATH}{os.pathsep}{PEERS}", "TMPDIR": str(self.folder), "COLUMNS": "200",
        }  # fmt: skip
        self.said_before = len(self.text())
        with self.log.open("ab") as stream:
            self.processes = [
                subprocess.Popen(
                    wrap(number, command) if wrap else command,
                    cwd=self.folder, env=environ, stdout=stream, stderr=stream, start_new_session=True,
                )
                for number, command in enumerate(self.make(self.tool, self, form))
            ]  # fmt: skip

    def text(self) -> str:
        """What it has said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def step(self) -> int:
        """Return the last recorded step."""
        if self.tool == "Samebits":
            place = self.data / "run" / "metrics.jsonl"
            lines = place.read_text().splitlines() if place.exists() else []
            steps = [json.loads(line)["step"] for line in lines[-3:] if '"train"' in line and line.endswith("}")]
            return steps[-1] if steps else 0
        place = self.folder / "steps-0"
        lines = place.read_text().splitlines() if place.exists() else []
        return int(lines[-1].split()[0]) if lines and len(lines[-1].split()) == 3 else 0

    def rank_pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        if self.tool != "Samebits":
            return int((self.folder / f"steps-{rank}").read_text().splitlines()[-1].split()[2])
        log = str(self.data / "run" / "logs" / f"rank-{rank}.log")
        for place in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if os.readlink(place) == log:
                    return int(place.parts[2])
        raise RuntimeError(f"no process has {log} open")

    def until_step(self, step: int, limit_s: float = 90) -> None:
        """Wait until a step is recorded."""
        end = time.monotonic() + limit_s
        while self.step() < step:
            if time.monotonic() > end or self.is_over():
                raise RuntimeError(f"did not come to step {step}: {self.text()[-300:]}")
            time.sleep(0.01)

    def is_over(self) -> bool:
        """Return whether all commands have ended."""
        return all(process.poll() is not None for process in self.processes)

    def mark(self) -> None:
        """Record the time of the fault."""
        self.fault_at, self.said_before = time.time(), len(self.text())

    def follow(self, expects_steps: bool = True, limit_s: float | None = None) -> Outcome:
        """Observe the job from the fault to its end."""
        outcome, before = Outcome(), self.step()
        low: int | None = None
        end = self.fault_at + (limit_s or self.setting.limit_s)
        # What has been noticed may take a while to be mended.
        while not self.is_over() and time.time() < end + (0 if outcome.noticed_s is None else self.setting.limit_s):
            self._look(outcome)
            step = self.step()
            if step < before and step > 0 and low is None:
                low = step
                outcome.next_step_s, outcome.redone = time.time() - self.fault_at, before - step + 1
            time.sleep(0.01)
        self._look(outcome)
        if self.is_over():
            outcome.code = next((process.returncode for process in self.processes if process.returncode), 0)
            if outcome.noticed_s is None and outcome.code:
                outcome.noticed_s = time.time() - self.fault_at
            time.sleep(2)
            outcome.left = self.num_left()
        return outcome

    def _look(self, outcome: Outcome) -> None:
        if outcome.noticed_s is not None:
            return
        for line in self.text()[self.said_before :].splitlines():
            if NEWS.search(line):
                outcome.noticed_s = max(0.0, time.time() - self.fault_at)
                line = re.sub(r"^[WEI]\d{4}.*?\] ", "", line).replace(str(self.data), "DIR")
                outcome.said = re.sub(r"\s+", " ", line).strip()
                return

    def num_left(self) -> int:
        """Return the processes of this job that still exist."""
        wanted, found = str(self.data).encode(), 0
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_zombie = (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                found += not is_zombie and wanted in (place / "environ").read_bytes()
        return found

    def final(self) -> str:
        """Return the hash of rank 0's final weights, or an empty text."""
        if self.tool == "Samebits":
            place = self.data / "run" / "result.json"
            return str(json.loads(place.read_text())["weights_sha256"]) if place.exists() else ""
        place = self.folder / "final-0.json"
        return str(json.loads(place.read_text())["sha256"]) if place.exists() else ""

    def ranks_differ(self) -> bool:
        """Return whether ranks ended with different parameters."""
        found = {json.loads(place.read_text())["parameters"] for place in self.folder.glob("final-*.json")}
        return len(found) > 1

    def go_on(self, outcome: Outcome, wanted: str, before: int | None = None) -> Outcome:
        """Start the job again, wait for its end, and compare."""
        if not self.final():
            self.start()
            end = time.monotonic() + 120
            first = None
            while not self.is_over() and time.monotonic() < end:
                step = self.step()
                if before is not None and first is None and 0 < step < before:
                    first, outcome.redone = step, before - step + 1
                time.sleep(0.01)
            self.end()
        return self.compare(outcome, wanted)

    def compare(self, outcome: Outcome, wanted: str) -> Outcome:
        """Return whether the final weights are those of a run without a fault."""
        if not self.final():
            outcome.remark = "no result"
        elif self.ranks_differ():
            outcome.remark = "no: ranks differ"
        else:
            outcome.same = self.final() == wanted
        return outcome

    def end(self) -> None:
        """Kill all remaining processes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGCONT)
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
        # torchrun's processes have sessions of their own.
        wanted = str(self.data).encode()
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(place.name) != os.getpid() and wanted in (place / "environ").read_bytes():
                    os.kill(int(place.name), signal.SIGKILL)


def undisturbed(tool: str, work: Path, setting: Setting) -> str:
    """Return the tool's hash of a run without a fault."""
    job = Job(tool, work / f"undisturbed-{tool.replace(' ', '-')}", setting, commands)
    job.start()
    job.mark()
    try:
        while not job.is_over() and time.time() < job.fault_at + 300:
            time.sleep(0.05)
    finally:
        job.end()
    if not job.final():
        raise SystemExit(f"{tool} has no result undisturbed: {job.text()[-2000:]}")
    print(f"{tool}: hash without a fault {job.final()[:8]}", flush=True)
    return job.final()
