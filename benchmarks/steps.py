"""Step time, peak memory and start time of three networks in plain PyTorch, Lightning, Accelerate and Samebits.

    python -m benchmarks.steps --peers-python .venv/bench/bin/python
    python -m benchmarks.steps --rounds 2 --networks crnn        # a quick trial

One process each, one thread, on the GPU if there is one; small images, so that it takes minutes on a CPU. All run the
same network and loss on the same batch in memory (peers/steps_job.py). They start one after the other, which gives
the time to the first step, including imports. Then all take turns of `--steps` steps, in an order that shifts by one
each round, so that a slower machine slows all. Prints the median over the rounds, and the median of the rounds'
ratios to "tuned": plain PyTorch with channels last and the fused optimizer, which are Samebits's defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
JOB = ROOT / "benchmarks" / "peers" / "steps_job.py"
NETWORKS = ("resnet34", "crnn", "higherhrnet-w32")
TOOLS = {  # the name of each in steps_job.py
    "plain, tuned": "plain-tuned",
    "plain PyTorch": "plain",
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "Samebits exact": "samebits",
    "Samebits compile": "samebits-compile",
}
OF_PEERS = ("lightning", "accelerate")
BASE = next(iter(TOOLS))


class Job:
    """A process that runs steps on request."""

    def __init__(self, tool: str, network: str, python: str, num_steps: int, folder: Path) -> None:
        self.errors = folder / f"{tool}.txt"
        listen, self._say = os.pipe()
        self._hear, answer = os.pipe()
        environ = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH, "BENCH_STEPS": str(num_steps),
            "BENCH_EAR": str(listen), "BENCH_MOUTH": str(answer), "BENCH_STARTED": str(time.time()),
        }  # fmt: skip
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(JOB), tool, network], cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=errors,
                stderr=errors, pass_fds=(listen, answer),
            )  # fmt: skip
        os.close(listen)
        os.close(answer)
        self._facts = os.fdopen(self._hear)
        self.first_step_s = self._fact()["first_step_s"]

    def turn(self) -> dict[str, float]:
        """Return the seconds of a step, and the peak memory in bytes."""
        os.write(self._say, b".")
        return self._fact()

    def end(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.wait()
        self._facts.close()
        os.close(self._say)

    def _fact(self) -> dict[str, float]:
        line = self._facts.readline()
        if not line:
            raise SystemExit(f"a job failed:\n{self.errors.read_text()[-4000:]}")
        fact: dict[str, float] = json.loads(line)
        return fact


def compare(network: str, tools: dict[str, str], peers_python: str, num_steps: int, num_rounds: int) -> Iterable[str]:
    """Return one row per tool."""
    jobs: dict[str, Job] = {}
    turns: dict[str, list[dict[str, float]]] = {title: [] for title in tools}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for title, tool in tools.items():
                python = peers_python if tool in OF_PEERS else sys.executable
                jobs[title] = Job(tool, network, python, num_steps, Path(folder))
            order = list(jobs)
            for number in range(num_rounds + 1):
                for title in order[number % len(order) :] + order[: number % len(order)]:
                    fact = jobs[title].turn()
                    if number:  # the first round warms up
                        turns[title].append(fact)
        finally:
            for job in jobs.values():
                job.end()
    yield f"{network:<18} {'step ms':>9} {'ratio':>6} {'least ms':>9} {'peak MB':>8} {'first step s':>13}"
    base = turns[BASE]
    for title, taken in turns.items():
        ratio = statistics.median(own["step_s"] / other["step_s"] for own, other in zip(taken, base, strict=True))
        steps = [turn["step_s"] for turn in taken]
        yield (
            f"{title:<18} {1e3 * statistics.median(steps):>9.1f} {ratio:>6.3f} {1e3 * min(steps):>9.1f} "
            f"{taken[-1]['peak_bytes'] / 1e6:>8.0f} {jobs[title].first_step_s:>13.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default="", help="Python interpreter with lightning and accelerate")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument(
        "--tools", default="", help=f"names as in steps_job.py, in addition to {TOOLS[BASE]}; default: all"
    )
    parser.add_argument("--steps", type=int, default=1, help="steps per turn; 20 or more on a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    wanted = [TOOLS[BASE], *arguments.tools.split(",")] if arguments.tools else list(TOOLS.values())
    tools = {title: tool for title, tool in TOOLS.items() if tool in wanted}
    if not arguments.peers_python:
        tools = {title: tool for title, tool in tools.items() if tool not in OF_PEERS}
    for network in arguments.networks.split(","):
        rows = compare(network, tools, arguments.peers_python, arguments.steps, arguments.rounds)
        print("\n".join(rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
