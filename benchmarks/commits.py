"""Step time of two commits, or of one with other settings: each trains in turn.

    python -m benchmarks.commits 1d29eb2    # before in-step recovery, against the checkout
    python -m benchmarks.commits HEAD --new-settings cluster.recovery=in_step --rounds 21
    python -m benchmarks.commits 1d29eb2 --source classify/shapes --settings global_batch=32 epochs=1

Checks the old commit out into a temporary git worktree, and trains with its code and with that of the checkout, in turn
and in a changing order. Prints the medians of the step times, and the median of the ratios of neighboring runs with
its quartiles. The first steps of each epoch are left out, as they follow an evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def step_s(code: Path, source: str, settings: list[str], procs: int, folder: Path) -> float:
    """Train with the code of a checkout; return the median seconds of a step."""
    environ = {**os.environ, "PYTHONPATH": str(code / "src")}
    command = [sys.executable, "-m", "samebits", "train", source, *settings, "report.tensorboard=false"]
    done = subprocess.run(
        [*command, "--procs", str(procs), "--run-dir", str(folder)],
        cwd=code, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    found = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in pairwise(lines)
        if before["kind"] == after["kind"] == "train"
    ]
    return statistics.median(found)


def main() -> int:
    """Print a line for each round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the old one")
    parser.add_argument("--source", default="digits", help="what is trained")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="settings of both")
    parser.add_argument(
        "--new-settings", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the new"
    )
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        old = Path(name) / "old"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(old), given.commit], check=True)
        try:
            sides = [(old, given.settings), (ROOT, [*given.settings, *given.new_settings])]
            for turn in range(given.rounds):
                found = [0.0, 0.0]
                for side in (0, 1) if turn % 2 else (1, 0):
                    code, settings = sides[side]
                    folder = Path(name) / f"{turn}-{side}"
                    found[side] = step_s(code, given.source, settings, given.procs, folder)
                pairs.append((found[0], found[1]))
                print(f"{1e3 * found[0]:.2f} ms, {1e3 * found[1]:.2f} ms, ratio {found[1] / found[0]:.3f}", flush=True)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(old)], check=True)
    before, after = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([new / old_s for old_s, new in pairs], n=4)
    print(
        f"\n| {given.source}, {given.procs} processes | old, ms | new, ms | ratio | quartiles |\n|---|---|---|---|---|"
    )
    print(f"| {len(pairs)} rounds | {before:.2f} | {after:.2f} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
