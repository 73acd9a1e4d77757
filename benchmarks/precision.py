"""Final metric, loss, overflows and training time of a recipe in each precision.

    python benchmarks/precision.py                                        # digits, on CPU: fp32, bf16, fp16
    python benchmarks/precision.py mnist data.root=DIR epochs=2
    python benchmarks/precision.py digits device=cuda --precisions fp32 tf32 bf16 fp16

Samples, order, seeds and settings are the same; only the precision of the model differs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import yaml

import samebits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="digits")
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--procs", type=int, default=2)
    arguments = parser.parse_args()
    settings = dict(text.split("=", 1) for text in arguments.settings)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for precision in arguments.precisions:
            chosen = {name: yaml.safe_load(value) for name, value in settings.items()}
            run = samebits.train(
                arguments.recipe,
                chosen | {"precision": precision},
                procs=arguments.procs,
                run_dir=Path(place) / precision,
            )
            result = json.loads((run.folder / "result.json").read_text())
            figures = ", ".join(f"{name} {value:.4f}" for name, value in run.metrics.items())
            rows.append(
                f"| {precision} | {figures} | {result.get('overflow_steps', 0)} of {result['steps']} "
                f"| {result['seconds']['training']:.0f} |"
            )
    print("| precision | validation metrics | steps skipped (overflow) | training s |")
    print("|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
