"""What leaves a machine in a step, and how long a step takes over a slow link, in exact mode and with DDP.

    sudo python -m benchmarks.link                                  # Linux; makes network namespaces
    sudo python -m benchmarks.link --layouts 3+1,1+1+4 --models cnn --megabits 0

Each machine is a network namespace with its own link (`link_worker.py` runs in it). Bytes are read from its interface,
headers of TCP included, as the largest number over the machines. `bound` is 2 (H-1)/H for H machines: what a machine
must send of the gradient if each has one sum. The hash is that of the
weights; with one number of micro-batches it is the same for all layouts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host, hosts, why_not

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
MODES = ("exact", "exact-bf16", "ddp")


def run(
    machines: list[Host], layout: list[int], model: str, mode: str, steps: int, micro_batches: int
) -> dict[str, Any]:
    """Train on some processes of each machine, and return the largest figures of all."""
    common = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(sum(layout)),
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": "29530",
        "LINK_MICRO_BATCHES": str(micro_batches or sum(layout)),
    }
    if mode == "ddp":
        common["GLOO_SOCKET_IFNAME"] = "eth0"
    kind, _, compress = mode.partition("-")
    command = [sys.executable, "-m", "benchmarks.link_worker", model, kind, compress or "none", steps]
    rank, running = itertools.count(), []
    for host, count in zip(machines, layout, strict=False):
        for local in range(count):
            environ = {**common, "RANK": str(next(rank)), "LOCAL_RANK": str(local)}
            running.append(host.start(*command, env=environ, cwd=ROOT))
    said = [process.communicate(timeout=900)[0] for process in running]
    lines = [line.removeprefix("FOUND ") for text in said for line in text.splitlines() if line.startswith("FOUND ")]
    if len(lines) < len(running):
        raise SystemExit("\n".join(said))
    found = list(map(json.loads, lines))
    hashes = {each["hash"] for each in found}
    largest = {name: max(each[name] for each in found) for name in ("seconds", "bytes", "gradient_bytes")}
    return {**largest, "hash": "-" if mode == "ddp" else hashes.pop() if len(hashes) == 1 else "DIFFERENT"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="1+1,2+2,4+4,1+1+1,2+2+2", help="processes of each machine")
    parser.add_argument("--models", default="resnet18,cnn")
    parser.add_argument("--modes", default="exact,ddp", help=f"of {', '.join(MODES)}")
    parser.add_argument("--megabits", default="100,1000", help="rate of each link; 0: no limit")
    parser.add_argument("--steps", type=int, default=6, help="the first one is not measured")
    parser.add_argument("--micro-batches", type=int, default=0, help="of a step; 0: one for each process")
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    print("| model | processes | Mbit/s | mode | MB out of a machine | of the gradient | bound | s/step | hash |")
    print("|---|---|---|---|---|---|---|---|---|")
    layouts = [list(map(int, layout.split("+"))) for layout in options.layouts.split(",")]
    with tempfile.TemporaryDirectory() as work, hosts(max(map(len, layouts)), Path(work)) as machines:
        for rate in map(int, options.megabits.split(",")):
            for host in machines if rate else []:
                host.slow(rate)
            for model, layout in itertools.product(options.models.split(","), layouts):
                for mode in options.modes.split(","):
                    found = run(machines, layout, model, mode, options.steps, options.micro_batches)
                    share = found["bytes"] / found["gradient_bytes"]
                    bound = 2 * (len(layout) - 1) / len(layout)
                    cells = [model, "+".join(map(str, layout)), rate or "no limit", mode, f"{found['bytes'] / 1e6:.1f}"]
                    cells += [f"{share:.3f}", f"{bound:.3f}", f"{found['seconds']:.2f}", found["hash"]]
                    print("|", " | ".join(map(str, cells)), "|", flush=True)
            for host in machines if rate else []:
                host.unslow()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
