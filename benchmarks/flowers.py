"""Accuracy on flower_photos from scratch within minutes on CPUs: Lockstep's preset and a hand-written DDP job.

    python benchmarks/flowers.py --data ../shared/data/flower_photos                      # 10 minutes each
    python benchmarks/flowers.py --data FOLDER --minutes 10 --picture docs/pictures/classify-scratch.png

Both train ResNet-18 from scratch at 128 px on the same images (a fifth of each class for validation, by seed) with 2
processes of 1 thread, and are evaluated on all validation images after each epoch. One epoch of Lockstep is timed
first to compute how many fit; its time is that of the whole command. The hand-written job then gets the same time. It
is the multi-process job of flower tutorials: DistributedSampler with set_epoch, RandomResizedCrop and horizontal
flips, ImageFolder and Pillow, batch 16 and learning rate 0.001 per process, SGD with momentum 0.9, weight decay
0.005, cosine schedule to a tenth over 30 epochs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.models import resnet18

from lockstep.recipes.classify.folders import list_folder
from lockstep.recipes.classify.listing import split

SIZE_PX, BATCH, EPOCHS = 128, 16, 30
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Curve = list[tuple[float, float]]  # (minutes since the start, top-1 in percent)


class Files(Dataset[tuple[torch.Tensor, int]]):
    """Images as the tutorials read them."""

    def __init__(self, folder: Path, files: dict[str, list[str]], train: bool) -> None:
        self.items = [(folder / name, label) for label, names in enumerate(files.values()) for name in names]
        crop = (
            [transforms.RandomResizedCrop(SIZE_PX), transforms.RandomHorizontalFlip()]
            if train
            else [transforms.Resize(round(SIZE_PX * 256 / 224)), transforms.CenterCrop(SIZE_PX)]
        )
        self.transform = transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.items[index]
        return self.transform(Image.open(path).convert("RGB")), label


def hand_written(rank: int, store: str, folder: Path, seed: int, minutes: float, began: float, answer: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train, held_out = split(list_folder(folder, "folder"), 0.2, seed)
    data = Files(folder, train, True)
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    test = DataLoader(Files(folder, held_out, False), batch_size=32)
    model = DistributedDataParallel(resnet18(num_classes=len(train)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * 2, momentum=0.9, weight_decay=0.005)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: (1 + math.cos(epoch * math.pi / EPOCHS)) / 2 * 0.9 + 0.1
    )
    curve: Curve = []
    num_samples, training_s = 0, 0.0
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        model.train()
        start = time.time()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            num_samples += 2 * len(images)
        if epoch < EPOCHS:
            schedule.step()
        training_s += time.time() - start
        right = torch.zeros(1)
        model.eval()
        with torch.no_grad():
            for place, (images, labels) in enumerate(test):
                if place % 2 == rank:
                    right += (model.module(images).argmax(1) == labels).sum()
        dist.all_reduce(right)
        minutes_now = torch.tensor((time.time() - began) / 60)
        dist.broadcast(minutes_now, 0)
        curve.append((float(minutes_now), 100 * float(right) / len(test.dataset)))
        if float(minutes_now) * (epoch + 2) / (epoch + 1) > minutes:
            break
    if rank == 0:
        answer.write_text(json.dumps({"curve": curve, "samples_per_s": num_samples / training_s}))
    dist.destroy_process_group()


def run_hand_written(folder: Path, seed: int, minutes: float) -> tuple[Curve, float]:
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        mp.spawn(hand_written, (f"{place}/store", folder, seed, minutes, time.time(), answer), nprocs=2)
        found = json.loads(answer.read_text())
    return found["curve"], found["samples_per_s"]


def run_lockstep(folder: Path, seed: int, epochs: int, settings: list[str]) -> tuple[Curve, float, float]:
    """Return the curve, samples per second, and seconds to the first step."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        command = [sys.executable, "-m", "lockstep", "train", "classify/flowers_scratch", f"data.root={folder}"]
        command += [f"epochs={epochs}", f"seed={seed}", *settings, "--procs", "2", "--run-dir", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        result = json.loads((run / "result.json").read_text())
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first_s, all_s = result["seconds"]["first_step"], result["seconds"]["all"]
    points = [(record["epoch"], 100 * record["top1"]) for record in records if record["kind"] == "eval"]
    curve = [((first_s + (all_s - first_s) * epoch / epochs) / 60, top1) for epoch, top1 in points]
    return curve, result["samples_per_s"], first_s


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Draw accuracy over minutes as a PNG file."""
    width, height, left, top, right, bottom = 720, 400, 60, 30, 20, 50
    image = Image.new("RGB", (width, height), "white")
    pen, font, small = ImageDraw.Draw(image), ImageFont.load_default(14), ImageFont.load_default(12)
    longest = max(minutes for curve in curves.values() for minutes, _ in curve)

    def place(minutes: float, percent: float) -> tuple[float, float]:
        return (
            left + (width - left - right) * minutes / longest,
            height - bottom - (height - top - bottom) * percent / 100,
        )

    for percent in range(0, 101, 20):
        pen.line([place(0, percent), place(longest, percent)], fill=(225, 225, 225))
        pen.text((left - 8, place(0, percent)[1]), f"{percent}%", (110, 110, 110), small, anchor="rm")
    for minutes in range(0, int(longest) + 1, 2):
        pen.text((place(minutes, 0)[0], height - bottom + 6), f"{minutes} min", (110, 110, 110), small, anchor="ma")
    highest = max(curve[-1][1] for curve in curves.values())
    for (name, curve), colour in zip(curves.items(), [(33, 102, 172), (178, 24, 43)], strict=True):
        pen.line([place(*point) for point in curve], fill=colour, width=3)
        x, y = place(*curve[-1])
        # The upper one's name above its curve, the lower one's below.
        at, anchor = (y - 14, "rs") if curve[-1][1] == highest else (y + 18, "rt")
        pen.text((x - 4, at), f"{name}: {curve[-1][1]:.1f}%", colour, font, anchor=anchor)
    title = "Held-out top-1 of flower_photos from scratch, 640 training pictures, 128 px"
    pen.text((left, 8), title, (34, 34, 34), font)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="epochs of Lockstep; default: measured to fit --minutes")
    parser.add_argument("--picture", type=Path, help="file for a chart of the curves")
    parser.add_argument("--only", choices=("lockstep", "hand_written"))
    parser.add_argument("settings", nargs="*", help="settings for Lockstep, such as optim.lr=0.1")
    arguments = parser.parse_args()
    folder, minutes = arguments.data.absolute(), arguments.minutes
    curves: dict[str, Curve] = {}
    if arguments.only != "hand_written":
        epochs = arguments.epochs
        if epochs is None:
            curve, _, first_s = run_lockstep(folder, arguments.seed, 2, arguments.settings)
            epochs = int((0.95 * minutes * 60 - first_s) / ((curve[-1][0] * 60 - first_s) / 2))
        curve, rate, _ = run_lockstep(folder, arguments.seed, epochs, arguments.settings)
        report("Lockstep, classify/flowers_scratch", curve, rate)
        curves["Lockstep"], minutes = curve, curve[-1][0]
    if arguments.only != "lockstep":
        curve, rate = run_hand_written(folder, arguments.seed, minutes)
        report("hand-written DDP, tutorials' settings", curve, rate)
        curves["hand-written DDP"] = curve
    if arguments.picture is not None and len(curves) == 2:
        draw(curves, arguments.picture)


def report(name: str, curve: Curve, rate: float) -> None:
    best = max(top1 for _, top1 in curve)
    print(
        f"{name}: top-1 {curve[-1][1]:.1f}% after {len(curve)} epochs in {curve[-1][0]:.1f} minutes "
        f"(best epoch {best:.1f}%), {rate:.0f} pictures/s while training"
    )
    print("  " + " ".join(f"{top1:.0f}" for _, top1 in curve), flush=True)


if __name__ == "__main__":
    main()
