"""Throughput of two ranks of which one has half a core, with even and with balanced work, beside DDP.

    python -m benchmarks.load_balance [--steps 120]

Each rank is pinned to a core of its own. A busy loop on rank 1's core takes half of its time. The ideal is three
quarters of the throughput without the loop: rank 0's half of it, and half of rank 1's. Images per second are those of
the second half of the steps. The weights of all three runs of Samebits must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.load_balance_recipe import GLOBAL_BATCH

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHON_PATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])


@contextmanager
def busy_core() -> Iterator[None]:
    """Run a busy loop on the second core."""
    core = sorted(os.sched_getaffinity(0))[1]
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def images_per_s(ends: list[float]) -> float:
    """Return the throughput of the second half of the steps, whose ends are in seconds."""
    half = ends[len(ends) // 2 :]
    return GLOBAL_BATCH * (len(half) - 1) / (half[-1] - half[0])


def samebits(folder: Path, environ: dict[str, str], *settings: str) -> tuple[float, str]:
    """Train the job, and return its throughput and the digest of its weights."""
    command = ["train", HERE / "load_balance_recipe.py", *settings, "--procs", "2", "--run-dir", folder]
    subprocess.run([sys.executable, "-m", "samebits", *command], env=environ, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    ends = [line["seconds"] for line in lines if line["kind"] == "train"]
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return images_per_s(ends), result["weights_sha256"]


def ddp(environ: dict[str, str]) -> float:
    """Train the job with DDP, and return its throughput."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, HERE / "peers" / "load_balance_ddp.py"], env=environ, check=True, capture_output=True, text=True
    )
    return images_per_s([float(word) for word in done.stdout.split()])


def main() -> int:
    """Print a row for each job; the exit code tells whether all weights are equal and 90% of the ideal is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("needs 2 cores")
    environ = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "BALANCE_STEPS": str(options.steps),
    }
    balanced = "cluster.load_balancing=true"
    with tempfile.TemporaryDirectory(prefix="samebits-balance-") as name:
        place = Path(name)
        whole, first = samebits(place / "whole", environ)
        whole_ddp = ddp(environ)
        with busy_core():
            even, second = samebits(place / "even", environ)
            divided, third = samebits(place / "divided", environ, balanced)
            even_ddp = ddp(environ)
    print("2 ranks, 24 micro-batches a step                    images/s   of the ideal")
    for text, value, full in (
        ("both ranks have a core      Samebits", whole, None),
        ("                            DDP", whole_ddp, None),
        ("rank 1 has half of its core Samebits, even work", even, whole),
        ("                            Samebits, balanced", divided, whole),
        ("                            DDP", even_ddp, whole_ddp),
    ):
        print(f"{text:<52}{value:8.0f}" + (f"{value / (0.75 * full):15.0%}" if full else ""))
    is_equal = first == second == third
    print(f"weights of the runs of Samebits: {'equal' if is_equal else 'DIFFERENT'}")
    return 0 if is_equal and divided >= 0.9 * 0.75 * whole else 1


if __name__ == "__main__":
    sys.exit(main())
