"""What leaves a machine in a step, and how long a step takes over a slow link, in exact mode and with DDP.

    sudo make bench-link                                               # Linux; makes network namespaces
    sudo python -m benchmarks.link --layouts 3+1,1+1+4 --models cnn --megabits 100
    sudo python -m benchmarks.link --layouts 1+1 --models resnet18-128 --images 16 --megabits 1000

Each machine is a network namespace with its own link (`link_worker.py` runs in it). All ways of training take turns, a
step each, in the same processes. With H machines and W processes:

    bytes    out of a machine in a step, relative to the gradient: the largest of all machines, read from its interface
             with the headers of TCP. Bar: 1.05 times 2 (H-1)/H
    ratio    of the medians of the steps' times, exact to DDP. Bar: 1.0; where processes share a machine and the link is
             slower than they are (100 Mbit/s), 1.08 times 2 (H-1)/H over 2 (W-1)/W, which a ring sends
    hidden   share of the communication behind the passes: 1 - (exact step - step without messages) / (bytes / rate)
    weights  of exact mode; with one number of micro-batches they are the same for all layouts
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.small_networks import rest_text
from samebits.cores import describe_other_load
from tests.cluster.hosts import Host, hosts, why_not

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
MODES = ("exact", "ddp", "local")
SLOW = 100  # Mbit/s of a link that takes longer than all else, even with two processes a core
HEADINGS = (
    "model", "processes", "Mbit/s", "MB exact", "bytes", "bar", "DDP", "s exact", "s DDP", "ratio", "bar",
    "hidden", "weights", "missed",
)  # fmt: skip


def run(machines: list[Host], layout: list[int], model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train on some processes of each machine; return the largest figures of all for each mode, and the gradient."""
    common = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(sum(layout)),
        "MASTER_ADDR": machines[0].address,
        "MASTER_PORT": "29530",
        "LINK_MICRO_BATCHES": str(options.micro_batches or sum(layout)),
    }
    command = [sys.executable, "-m", "benchmarks.link_worker", model, options.modes, options.images, options.steps]
    rank, running = itertools.count(), list[subprocess.Popen[str]]()
    for host, count in zip(machines, layout, strict=False):
        for local in range(count):
            environ = {**common, "RANK": str(next(rank)), "LOCAL_RANK": str(local)}
            running.append(host.start(*command, env=environ, cwd=ROOT))
    said = [process.communicate(timeout=900)[0] for process in running]
    lines = [line.removeprefix("FOUND ") for text in said for line in text.splitlines() if line.startswith("FOUND ")]
    if len(lines) < len(running):
        raise SystemExit("\n".join(said))
    ranks = [json.loads(line) for line in lines]
    found: dict[str, Any] = {"gradient": ranks[0]["gradient"]}
    for mode in options.modes.split(","):
        each = [rank["modes"][mode] for rank in ranks]
        hashes = {rank["hash"] for rank in each}
        found[mode] = {name: max(rank[name] for rank in each) for name in ("seconds", "bytes")}
        found[mode]["hash"] = hashes.pop() if len(hashes) == 1 else "DIFFERENT"
    return found


def cells(found: dict[str, Any], layout: list[int], rate: int) -> Iterator[tuple[str, bool]]:
    """Return the cells of a row, from the megabytes on, each with whether it misses its bar."""
    exact, ddp, gradient = found["exact"], found.get("ddp"), found["gradient"]
    size, every = len(layout), sum(layout)
    bound = 2 * (size - 1) / size
    share = exact["bytes"] / gradient
    yield f"{exact['bytes'] / 1e6:.1f}", False
    yield f"{share:.3f}", share > 1.05 * bound
    yield f"{1.05 * bound:.3f}", False
    yield (f"{ddp['bytes'] / gradient:.3f}" if ddp else ""), False
    yield f"{exact['seconds']:.3f}", False
    yield (f"{ddp['seconds']:.3f}" if ddp else ""), False
    is_bound = 0 < rate <= SLOW and max(layout) > 1
    most = 1.08 * bound / (2 * (every - 1) / every) if is_bound else 1.0
    ratio = exact["seconds"] / ddp["seconds"] if ddp else 0.0
    yield (f"{ratio:.3f}" if ddp else ""), ratio > most
    yield f"{most:.3f}", False
    if rate and "local" in found:
        seconds = exact["bytes"] * 8 / (rate * 1e6)
        yield f"{1 - (exact['seconds'] - found['local']['seconds']) / seconds:.0%}", False
    else:
        yield "", False
    yield exact["hash"], exact["hash"] == "DIFFERENT"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layouts = "1+1,2+2,4+4,3+1,4+2,1+1+1,2+2+2,4+4+4,1+1+4"
    parser.add_argument("--layouts", default=layouts, help="processes of each machine")
    parser.add_argument("--models", default="resnet18-64,cnn", help="of cnn and resnet18-PIXELS")
    parser.add_argument("--modes", default=",".join(MODES), help="exact, and some of the others")
    parser.add_argument("--megabits", default="100,1000", help="rate of each link; 0: no limit")
    parser.add_argument("--steps", type=int, default=6, help="the first one is not measured")
    parser.add_argument("--images", type=int, default=2, help="in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=0, help="of a step; 0: one for each process")
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    print(f"{options.images} images in a micro-batch, {options.steps} steps; {rest_text(describe_other_load())}\n")
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    layouts = [list(map(int, layout.split("+"))) for layout in options.layouts.split(",")]
    has_missed = False
    with tempfile.TemporaryDirectory() as work, hosts(max(map(len, layouts)), Path(work)) as machines:
        for rate in map(int, options.megabits.split(",")):
            for host in machines if rate else []:
                host.slow(rate)
            for model, layout in itertools.product(options.models.split(","), layouts):
                row = list(cells(run(machines, layout, model, options), layout, rate))
                names = [name for name, (_, is_missed) in zip(HEADINGS[3:], row, strict=False) if is_missed]
                has_missed |= bool(names)
                texts = [model, "+".join(map(str, layout)), str(rate or "no limit"), *(text for text, _ in row)]
                print("|", " | ".join([*texts, ", ".join(names)]), "|", flush=True)
            for host in machines if rate else []:
                host.unslow()
    print(f"\nat the end: {rest_text(describe_other_load())}")
    return int(has_missed)


if __name__ == "__main__":
    raise SystemExit(main())
