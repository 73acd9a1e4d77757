"""Step time over a slow link, compared with the time that its bytes need.

    sudo python -m benchmarks.link          # Linux; makes two network namespaces

Two processes, each on a host of its own, train a model that is one large matrix (`link_recipe.py`), over a link with
a rate limit in both directions, and over the same link without one. The prediction is the step time without a limit
plus `2 (W-1)/W` times the gradient's bytes over the rate. Prints the median step time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from tests.cluster.hosts import Host, hosts, why_not

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])

RECIPE = Path(__file__).resolve().parent / "link_recipe.py"


def step_s(pair: list[Host], width: int, mode: str, folder: Path) -> float:
    """Return the median seconds between the ends of two steps."""
    environ = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "LINK_WIDTH": str(width),
    }
    command = [sys.executable, "-m", "samebits", "train", RECIPE, f"mode={mode}", "--run-dir", folder]
    join = ["--init", "tcp://n1:29530", "--world-size", 2, "--rank"]
    running = [host.start(*command, *join, rank, env=environ, cwd=folder.parent) for rank, host in enumerate(pair)]
    said = [process.communicate(timeout=300)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("\n".join(said))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    ends = [line["seconds"] for line in lines if line["kind"] == "train"]
    return statistics.median(after - before for before, after in pairwise(ends))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, default=100)
    parser.add_argument("--width", type=int, default=1500, help="width of the model, a square matrix")
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    num_bytes = 4 * options.width**2
    print(f"{num_bytes / 1e6:.1f} MB of gradient, 2 processes, {options.megabits} Mbit/s\n")
    print("| mode | without limit, s | predicted, s | measured, s | measured / predicted |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work, hosts(2, Path(work)) as pair:
        for mode in ("exact", "fast"):
            free = step_s(pair, options.width, mode, Path(work) / f"{mode}-free")
            for host in pair:
                host.slow(options.megabits)
            held = step_s(pair, options.width, mode, Path(work) / f"{mode}-held")
            for host in pair:
                host.unslow()
            predicted = free + num_bytes / (options.megabits * 1e6 / 8)
            print(f"| {mode} | {free:.3f} | {predicted:.3f} | {held:.3f} | {held / predicted:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
