"""Variants of training with the classify recipe: batch norm, frozen parts, processes.

    python benchmarks/classify_compared.py
    python benchmarks/classify_compared.py --num-per-class 100 --epochs 12

ResNet-18 at 48 px on synthetic shapes. First from scratch, with batch norm's statistics over the micro-batch and over
the global batch, on 1 and 2 processes. Then on other shapes: from scratch, from the first run's weights, and from
these with all but the head frozen. Prints validation top-1, the first digits of the weights' hash, and images per
second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from samebits.recipes.classify.config import MakeConfig
from samebits.recipes.classify.make import make


def train(name: str, run: Path, data: Path, epochs: int, procs: int, *settings: str) -> Path:
    command = [sys.executable, "-m", "samebits", "train", "classify/shapes", f"data.root={data}", "data.size_px=48"]
    command += [f"epochs={epochs}", "report.tensorboard=false", *settings]
    command += ["--procs", str(procs), "--run-dir", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(done.stderr)
    result = json.loads((run / "result.json").read_text())
    top1, rate = result["metrics"]["top1"], result["samples_per_s"]
    print(f"| {name} | {procs} | {top1:.1%} | `{result['weights_sha256'][:8]}` | {rate:.0f} |", flush=True)
    return run / "weights.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-per-class", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    epochs = arguments.epochs
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        make(MakeConfig(num_per_class=arguments.num_per_class, size_px=64), root / "a")
        make(MakeConfig(num_per_class=arguments.num_per_class // 3, size_px=64, seed=1), root / "b")
        print("| run | processes | top-1 | weights | images/s |")
        print("|---|---|---|---|---|")
        weights = train("batch_norm=micro", root / "1", root / "a", epochs, 1)
        train("batch_norm=micro", root / "2", root / "a", epochs, 2)
        train("batch_norm=sync", root / "3", root / "a", epochs, 1, "batch_norm=sync")
        train("batch_norm=sync", root / "4", root / "a", epochs, 2, "batch_norm=sync")
        tuned = ("optim.lr=0.01", f"model.weights={weights}")
        train("other shapes, from scratch", root / "5", root / "b", epochs, 2)
        train("other shapes, from those weights", root / "6", root / "b", epochs, 2, *tuned)
        train("the same, freeze=backbone", root / "7", root / "b", epochs, 2, *tuned, "model.freeze=backbone")
        train("the same, freeze=backbone", root / "8", root / "b", epochs, 1, *tuned, "model.freeze=backbone")


if __name__ == "__main__":
    main()
