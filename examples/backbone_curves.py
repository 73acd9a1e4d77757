"""Train networks of timm in three recipes on small data, from scratch, and plot the validation after each epoch.

    python examples/backbone_curves.py --out backbones          # --epochs 1: a trial

Needs timm and matplotlib (pip install timm), and no data: shapes are drawn, and text lines are made of the digits of
scikit-learn.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import samebits

NETWORKS = ("timm/convnext_atto", "timm/vit_tiny_patch16_dinov3_qkvb")
OPTIMIZER = {
    "name": "adamw", "lr": 1e-3, "weight_decay": 0.02, "schedule": "one_cycle", "peak_at": 0.2, "clip_norm": 1.0,
}  # fmt: skip
TASKS = ("segment", "text", "classify")
MOST_DIGITS = 6


def digits(*, train):
    """Return images (N, 8, 8) and labels (N,) of the UCI digits; every fifth of each class is for validation."""
    found = load_digits()
    is_validation = np.zeros(len(found.target), bool)
    is_validation[np.argsort(found.target, kind="stable")[::5]] = True
    chosen = ~is_validation if train else is_validation
    return found.images[chosen].astype(np.uint8), found.target[chosen]


def make_lines(folder, count, *, train):
    """Write images of one to six digits in a row, 32 px high, and their labels."""
    images, labels = digits(train=train)
    random = np.random.default_rng(int(train))
    name = "train" if train else "test"
    (folder / name).mkdir(parents=True)
    rows = []
    for index in range(count):
        chosen = random.integers(len(images), size=random.integers(1, MOST_DIGITS + 1))
        line = np.full((8, 8 * MOST_DIGITS), 255, np.uint8)
        for place, digit in enumerate(chosen):
            line[:, 8 * place : 8 * place + 8] = 255 - 15 * images[digit]
        Image.fromarray(line).resize((192, 32), Image.Resampling.BICUBIC).save(folder / name / f"{index:05}.png")
        rows.append(f"{name}/{index:05}.png\t{''.join(map(str, labels[chosen]))}")
    (folder / f"{name}.txt").write_text("\n".join(rows) + "\n")


def tasks(out):
    """Return for each task: preset, its own network, metric, and settings. Data that is missing is made."""
    lines = out / "lines"
    if not lines.exists():
        make_lines(lines, 800, train=True)
        make_lines(lines, 100, train=False)
    if not (out / "shapes").exists():
        command = ["data", "make", "classify", "num_per_class=60", "size_px=80", "--out", str(out / "shapes")]
        subprocess.run([sys.executable, "-m", "samebits", *command], check=True)
    return {
        "segment: synthetic shapes": (
            "segment_shapes", "unet", "mIoU", {"data.num_train": 256, "data.num_eval": 32},
        ),
        "text: lines of digits": (
            "text", "fast", "line_accuracy",
            {"data.root": str(lines), "data.width": 96, "global_batch": 32, "micro_batch": 16},
        ),
        "classify: the shape in a picture": ("classify/shapes", "resnet18", "top1", {"data.root": str(out / "shapes")}),
    }  # fmt: skip


def curve(run_dir, metric):
    """Return the metric of each validation of a run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row[metric] for row in rows if row["kind"] == "eval"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("backbones"), help="folder of data, runs and curves.png")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--procs", type=int, help="processes; the curves are equal for any number")
    args = parser.parse_args()
    found = {title: task for title, task in tasks(args.out.absolute()).items() if title.partition(":")[0] in args.tasks}
    figure, axes = plt.subplots(1, len(found), figsize=(4.4 * len(found), 3.6), layout="constrained", squeeze=False)
    for axis, (title, (preset, own, metric, settings)) in zip(axes[0], found.items(), strict=True):
        for network in (own, *NETWORKS):
            run_dir = args.out / f"{preset.partition('/')[0]}-{network.rpartition('/')[2]}"
            if not (run_dir / "result.json").exists():
                optimizer = {f"optim.{name}": value for name, value in OPTIMIZER.items()}
                chosen = {**settings, **optimizer, "model.name": network, "epochs": args.epochs}
                samebits.train(preset, chosen, procs=args.procs, run_dir=run_dir, resume="auto")
            values = curve(run_dir, metric)
            axis.plot(range(1, len(values) + 1), values, label=f"{network}: {values[-1]:.3f}")
        axis.set(title=title, xlabel="epoch", ylabel=metric, ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    figure.savefig(args.out / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
