"""A step of three networks beside plain PyTorch, Lightning and Accelerate: time, peak memory, time to the first one.

    python benchmarks/steps.py --peers-python .venv/bench/bin/python
    python benchmarks/steps.py --steps 4 --rounds 1 --networks crnn        # only to see that it works

One process, one thread, on the GPU if there is one; small pictures, so that it ends in minutes on a CPU. All run the
same network and loss on the same batch, which lies in memory (peers/steps_job.py). Each job is a process of its own;
they take turns in every round, in an order that shifts by one. A step's time is the median over a job's steps but for
the first two, then over the rounds; the first step counts from the process's start, imports and all. "tuned" is plain
PyTorch with channels last and the fused optimizer, which Lockstep has by default.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "peers" / "steps_job.py"
NETWORKS = ("resnet34", "crnn", "higherhrnet-w32")
TOOLS = {  # the name of each in steps_job.py
    "plain PyTorch": "plain",
    "plain, tuned": "plain-tuned",
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "Lockstep exact": "lockstep",
    "Lockstep fast": "lockstep-fast",
    "Lockstep compile": "lockstep-compile",
}
OF_PEERS = ("lightning", "accelerate")
LIMIT_S = 1800.0


def measured(tool: str, network: str, python: str, num_steps: int) -> dict[str, float]:
    """One job's figures."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "figures.json"
        environ = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BENCH_STEPS": str(num_steps),
            "BENCH_RESULT": str(result), "BENCH_STARTED": str(time.time()),
        }  # fmt: skip
        done = subprocess.run(
            [python, str(JOB), tool, network], cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode or not result.is_file():
            raise SystemExit(f"{tool} on {network} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        figures: dict[str, float] = json.loads(result.read_text())
        return figures


def table(network: str, rounds: dict[str, list[dict[str, float]]]) -> list[str]:
    """One row a tool; ratios are to the quickest one that is not Lockstep."""
    middle = {
        tool: {name: statistics.median(one[name] for one in each) for name in each[0]} for tool, each in rounds.items()
    }
    others = [row["step_s"] for tool, row in middle.items() if not tool.startswith("Lockstep")]
    quickest = min(others or [row["step_s"] for row in middle.values()])
    lines = [f"{network:<18} {'step ms':>9} {'ratio':>6} {'least ms':>9} {'peak MB':>8} {'first step s':>13}"]
    for tool, row in middle.items():
        least = min(one["step_s"] for one in rounds[tool])
        lines.append(
            f"{tool:<18} {1e3 * row['step_s']:>9.1f} {row['step_s'] / quickest:>6.3f} {1e3 * least:>9.1f} "
            f"{row['peak_bytes'] / 1e6:>8.0f} {row['first_step_s']:>13.1f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default="", help="an interpreter that has Lightning and Accelerate")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--tools", default="", help="names as in steps_job.py; all if left out")
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.steps < 4:
        parser.error("--steps must be 4 or more: the first two don't count")
    wanted = arguments.tools.split(",") if arguments.tools else list(TOOLS.values())
    tools = {title: tool for title, tool in TOOLS.items() if tool in wanted}
    if not arguments.peers_python:
        tools = {title: tool for title, tool in tools.items() if tool not in OF_PEERS}
    for network in arguments.networks.split(","):
        rounds: dict[str, list[dict[str, float]]] = {title: [] for title in tools}
        order = list(tools)
        for number in range(arguments.rounds):
            for title in order[number % len(order) :] + order[: number % len(order)]:
                python = arguments.peers_python if tools[title] in OF_PEERS else sys.executable
                rounds[title].append(measured(tools[title], network, python, arguments.steps))
        print("\n".join(table(network, rounds)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
