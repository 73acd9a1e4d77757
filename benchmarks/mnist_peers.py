"""Samebits and other tools on the MNIST job of many tutorials.

    python -m benchmarks.mnist_peers --data FOLDER-WITH-MNIST-GZ --peers-python .venv/bench/bin/python

All use the same network, global batch (64 per process), images and number of steps, one thread per process, on CPU.
The jobs take turns in every round, in an order that shifts by one. Samples per second are counted from step 20, the
time to the first step from the start of the command. `tuned` and `no workers` suit few cores; `bound` loads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = Path(__file__).resolve().parent / "peers"
BATCH_A_PROCESS = 64
PARAMETERS = 21_840
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class Setting:
    """Common settings of all jobs.

    Attributes:
        data: Folder in which `MNIST/raw` holds the four plain IDX files.
        steps: Optimizer steps a job, one epoch of so many global batches.
    """

    data: Path
    procs: int
    steps: int
    peers_python: str
    limit_s: float

    @property
    def num_train(self) -> int:
        """Number of images in the epoch."""
        return self.steps * BATCH_A_PROCESS * self.procs


@dataclass(frozen=True)
class Result:
    """One job in one round: speed from step 20, and seconds from the command to the end of step 1."""

    samples_per_s: float
    first_step_s: float
    loss: float


Job = Callable[[Setting, Path], Result]


def torchrun(script: str, *arguments: str, python: str = "", workers: int = 1) -> Job:
    """A job that torchrun starts."""

    def run(setting: Setting, folder: Path) -> Result:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.procs}")
        interpreter = setting.peers_python if python == "peers" else sys.executable
        return _timed([[interpreter, *launcher, str(PEERS / script), *arguments]], setting, folder, workers)

    return run


def one_by_one(script: str, *arguments: str) -> Job:
    """A job whose processes are started separately, as in two terminals."""

    def run(setting: Setting, folder: Path) -> Result:
        commands = [[sys.executable, str(PEERS / script), *arguments]] * setting.procs
        return _timed(commands, setting, folder, workers=0, ranks=True)

    return run


def lightning(workers: int) -> Job:
    """A job that starts its own processes."""

    def run(setting: Setting, folder: Path) -> Result:
        command = [setting.peers_python, str(PEERS / "with_lightning.py")]
        return _timed([command], setting, folder, workers)

    return run


def samebits(mode: str) -> Job:
    """The tutorial preset of the mnist recipe, as a user starts it."""

    def run(setting: Setting, folder: Path) -> Result:
        settings = {
            "data.root": setting.data / "MNIST" / "raw", "data.num_train": setting.num_train, "data.num_eval": 1000,
            "global_batch": BATCH_A_PROCESS * setting.procs, "micro_batch": BATCH_A_PROCESS, "num_threads": 1,
            "device": "cpu", "epochs": 1,
        }  # fmt: skip
        pairs = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "samebits", "train", "mnist/tutorial", *pairs]
        started_at = time.time()
        command += ["--procs", str(setting.procs), "--run-dir", str(folder / "run")]
        _finish([command], {}, setting, folder, None)
        facts = json.loads((folder / "run" / "result.json").read_text())
        if facts["steps"] != setting.steps:
            raise SystemExit(f"Samebits took {facts['steps']} steps, not {setting.steps}")
        # As for the others: from step 20 on, and from the command on.
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        first, *_, last = [line for line in lines if line["kind"] == "train" and line["step"] >= 20]
        num_samples = (last["step"] - first["step"]) * BATCH_A_PROCESS * setting.procs
        speed = num_samples / (last["seconds"] - first["seconds"])
        return Result(speed, facts["first_step_at"] - started_at, facts["metrics"]["loss"])

    return run


JOBS: dict[str, Job] = {
    "hand-written DDP": torchrun("hand_written.py", "tutorial"),
    "hand-written DDP, tuned": one_by_one("hand_written.py", "tuned"),
    "Lightning": lightning(workers=1),
    "Lightning, no workers": lightning(workers=0),
    "Accelerate": torchrun("with_accelerate.py", python="peers", workers=1),
    "Accelerate, no workers": torchrun("with_accelerate.py", python="peers", workers=0),
    "Samebits exact": samebits("exact"),
    "bound: data in memory": one_by_one("hand_written.py", "bound"),
}


def _timed(commands: list[list[str]], setting: Setting, folder: Path, workers: int, ranks: bool = False) -> Result:
    """Run a job that writes its measurements (peers/task.py), and check that it did this task."""
    result = folder / "figures.json"
    variables = {
        "BENCH_DATA": str(setting.data),
        "BENCH_STEPS": str(setting.steps),
        "BENCH_PROCS": str(setting.procs),
        "BENCH_WORKERS": str(workers),
        "BENCH_RESULT": str(result),
        "BENCH_STARTED": str(time.time()),
    }
    if ranks:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(setting.procs)}
    _finish(commands, variables, setting, folder, result, ranks)
    facts = json.loads(result.read_text())
    if facts["parameters"] != PARAMETERS:
        raise SystemExit(f"another network: {facts['parameters']} parameters")
    return Result(facts["samples_per_s"], facts["first_step_s"], facts["loss"])


def _finish(
    commands: list[list[str]],
    variables: dict[str, str],
    setting: Setting,
    folder: Path,
    figures: Path | None,
    ranks: bool = False,
) -> None:
    """Start the commands and wait for all. On any error, none of them is left behind."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **variables}
    log = folder / "log.txt"
    with log.open("w") as stream:
        running = [
            subprocess.Popen(
                command,
                cwd=folder,
                env={**environ, "RANK": str(rank)} if ranks else environ,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank, command in enumerate(commands)
        ]
        try:
            end = time.monotonic() + setting.limit_s
            codes = [process.wait(timeout=max(1.0, end - time.monotonic())) for process in running]
        finally:
            for process in running:
                _stop(process)
    if any(codes):
        said = f"exit codes {codes}; the end of its output:\n{log.read_text()[-2000:]}"
        # A peer may abort while its interpreter shuts down, after its last step and its figures: torch's own threads.
        if figures is None or not figures.is_file():
            raise RuntimeError(said)
        print(f"failed after its last step: {said}", file=sys.stderr, flush=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command by SIGTERM first, because a launcher that is killed cannot stop its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def lay_out(source: Path, target: Path) -> None:
    """Unpack MNIST's .gz files to target/MNIST/raw, where torchvision expects them."""
    raw = target / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in FILES:
        if not (source / f"{name}.gz").is_file():
            raise SystemExit(f"{source} does not hold {name}.gz; give MNIST's folder with --data DIR (make: DATA=DIR)")
        with gzip.open(source / f"{name}.gz") as packed, (raw / name).open("wb") as plain:
            shutil.copyfileobj(packed, plain)


def measure(names: list[str], rounds: int, setting: Setting, work: Path) -> dict[str, list[Result]]:
    """Run the jobs in turns. A job that fails is reported and left out from then on."""
    results: dict[str, list[Result]] = {name: [] for name in names}
    left = list(names)
    for turn in range(rounds):
        shift = turn % max(1, len(left))
        for name in [*left[shift:], *left[:shift]]:
            folder = work / f"{turn}-{names.index(name)}"
            folder.mkdir()
            try:
                result = JOBS[name](setting, folder)
            except (RuntimeError, subprocess.TimeoutExpired, OSError, KeyError) as error:
                print(f"{name} FAILED: {error}", file=sys.stderr, flush=True)
                left.remove(name)
                continue
            results[name].append(result)
            print(
                f"round {turn + 1}/{rounds}  {name:<24} {result.samples_per_s:>8,.0f} samples/s"
                f"  first step {result.first_step_s:5.1f} s  last loss {result.loss:.3f}",
                flush=True,
            )
    return {name: found for name, found in results.items() if len(found) == rounds}


def table(results: dict[str, list[Result]]) -> list[str]:
    """Return medians over the rounds, and the speed relative to the hand-written job."""
    speeds = {name: statistics.median(each.samples_per_s for each in found) for name, found in results.items()}
    base = speeds.get("hand-written DDP", float("nan"))
    lines = ["| job | samples/s | range | x hand-written | first step, s |", "|---|---|---|---|---|"]
    for name, found in results.items():
        every = sorted(each.samples_per_s for each in found)
        first = statistics.median(each.first_step_s for each in found)
        spread = f"{every[0]:,.0f} to {every[-1]:,.0f}"
        lines.append(f"| {name} | {speeds[name]:,.0f} | {spread} | {speeds[name] / base:.2f} | {first:.1f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four .gz files")
    parser.add_argument(
        "--peers-python", default=sys.executable, help="Python interpreter with lightning and accelerate"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="at most 468 with 2 processes: one epoch")
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(JOBS), help="jobs to run; default: all")
    parser.add_argument("--limit-s", type=float, default=300, help="maximum seconds of one job")
    parser.add_argument("--out", type=Path, help="JSON file for the measurements of every round")
    options = parser.parse_args()
    if options.steps <= 20 or options.steps * options.procs * BATCH_A_PROCESS > 60_000:
        parser.error(f"--steps {options.steps}: more than the 20 that warm up, and no more than one epoch of 60,000")
    peers_python = options.peers_python
    if os.sep in peers_python:  # jobs run in other folders; the link itself, since it is what makes the environment
        peers_python = str(Path(peers_python).absolute())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is stopped and the folder removed
    with tempfile.TemporaryDirectory(prefix="mnist-peers-") as work:
        lay_out(options.data, Path(work) / "data")
        setting = Setting(Path(work) / "data", options.procs, options.steps, peers_python, options.limit_s)
        results = measure(options.only or list(JOBS), options.rounds, setting, Path(work))
    print("\n".join(["", *table(results)]))
    if options.out:
        figures = {name: [vars(each) for each in found] for name, found in results.items()}
        options.out.write_text(json.dumps({"steps": options.steps, "procs": options.procs, "jobs": figures}, indent=1))
    return 0 if len(results) == len(options.only or JOBS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
