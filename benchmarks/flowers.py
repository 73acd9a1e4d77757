"""Accuracy on flower_photos from scratch within minutes on CPUs: Samebits's preset and a hand-written DDP job.

    python benchmarks/flowers.py --data ../shared/data/flower_photos                      # seeds 0, 1 and 2
    python benchmarks/flowers.py --data FOLDER --seeds 0 --picture docs/pictures/classify-scratch.png

Both train ResNet-18 from scratch on the same images (a fifth of each class for validation, by seed) with 2 processes
of 1 thread. The preset is run as it is. Its time is the CPU time of the whole command and all its processes, which
other programs lengthen less than the time on the clock; minutes are of 2 cores, so 10 are 20 minutes of CPU time. The
hand-written job then gets the same CPU time. It is the multi-process job of flower tutorials: DistributedSampler with
set_epoch, RandomResizedCrop and horizontal flips at 128 px, ImageFolder and Pillow, batch 16 and learning rate 0.001
per process, SGD with momentum 0.9, weight decay 0.005, cosine schedule to a tenth over 30 epochs, an evaluation after
each epoch. CPU time is measured on Linux.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
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

from samebits.recipes.classify.folders import list_folder
from samebits.recipes.classify.listing import split

SIZE_PX, BATCH, EPOCHS = 128, 16, 30
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Curve = list[tuple[float, float]]  # (CPU time since the start / 2, in minutes; top-1 in percent)

# Runs a command, then waits for its orphans too, such as a fork server and its workers: their CPU time is then counted.
WAIT_FOR_ALL = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
code = subprocess.call(sys.argv[1:])
while True:
    try:
        os.wait()
    except ChildProcessError:
        sys.exit(code)
"""


@dataclass(frozen=True)
class Outcome:
    """One training.

    Attributes:
        curve: Accuracy over CPU time.
        num_epochs: Epochs that were trained.
        clock_min: Time on the clock, in minutes.
    """

    curve: Curve
    num_epochs: int
    clock_min: float


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


def hand_written(rank: int, store: str, folder: Path, seed: int, minutes: float, answer: Path) -> None:
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
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if epoch < EPOCHS:
            schedule.step()
        right = torch.zeros(1)
        model.eval()
        with torch.no_grad():
            for place, (images, labels) in enumerate(test):
                if place % 2 == rank:
                    right += (model.module(images).argmax(1) == labels).sum()
        dist.all_reduce(right)
        minutes_now = torch.tensor(time.process_time() / 60 / 2)
        dist.all_reduce(minutes_now)
        curve.append((float(minutes_now), 100 * float(right) / len(test.dataset)))
        if float(minutes_now) * (epoch + 2) / (epoch + 1) > minutes:
            break
    if rank == 0:
        answer.write_text(json.dumps(curve))
    dist.destroy_process_group()


def run_hand_written(folder: Path, seed: int, minutes: float) -> Outcome:
    began = time.time()
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        mp.spawn(hand_written, (f"{place}/store", folder, seed, minutes, answer), nprocs=2)
        curve: Curve = [(minute, top1) for minute, top1 in json.loads(answer.read_text())]
    return Outcome(curve, len(curve), (time.time() - began) / 60)


def run_samebits(folder: Path, seed: int, settings: list[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        command = [sys.executable, "-m", "samebits", "train", "classify/flowers_scratch", f"data.root={folder}"]
        command += [f"seed={seed}", *settings, "--procs", "2", "--run-dir", str(run)]
        began, cpu_before_s = time.time(), cpu_s_of_children()
        subprocess.run(
            [sys.executable, "-c", WAIT_FOR_ALL, *command],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        minutes, clock_min = (cpu_s_of_children() - cpu_before_s) / 60 / 2, (time.time() - began) / 60
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(record["epoch"], 100 * record["top1"]) for record in records if record["kind"] == "eval"]
    num_epochs = points[-1][0]
    return Outcome([(minutes * epoch / num_epochs, top1) for epoch, top1 in points], num_epochs, clock_min)


def cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
    title = "Held-out top-1 of flower_photos from scratch, 640 training images, over minutes of 2 cores"
    pen.text((left, 8), title, (34, 34, 34), font)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=10.0, help="of 2 cores, without a run of Samebits; default 10")
    parser.add_argument("--picture", type=Path, help="file for a chart of the first seed's curves")
    parser.add_argument("--only", choices=("samebits", "hand_written"))
    parser.add_argument("--set", nargs="+", default=[], help="settings for Samebits, such as optim.lr=0.1")
    arguments = parser.parse_args()
    folder, minutes = arguments.data.absolute(), arguments.minutes
    found: dict[str, list[Outcome]] = {"Samebits": [], "hand-written DDP": []}
    print("job               seed  epochs  CPU minutes / 2  minutes on the clock  top-1")
    for seed in arguments.seeds:
        if arguments.only != "hand_written":
            outcome = run_samebits(folder, seed, arguments.set)
            minutes = outcome.curve[-1][0]
            report("Samebits", seed, outcome, found)
        if arguments.only != "samebits":
            report("hand-written DDP", seed, run_hand_written(folder, seed, minutes), found)
    for name, outcomes in found.items():
        if outcomes:
            mean = statistics.mean(outcome.curve[-1][1] for outcome in outcomes)
            print(f"{name:16}  mean  {'':6}  {'':15}  {'':20}  {mean:.1f}%")
    if arguments.picture is not None and all(found.values()):
        draw({name: outcomes[0].curve for name, outcomes in found.items()}, arguments.picture)


def report(name: str, seed: int, outcome: Outcome, found: dict[str, list[Outcome]]) -> None:
    found[name].append(outcome)
    minutes, top1 = outcome.curve[-1]
    print(
        f"{name:16}  {seed:4}  {outcome.num_epochs:6}  {minutes:15.1f}  {outcome.clock_min:20.1f}  {top1:.1f}%",
        flush=True,
    )


if __name__ == "__main__":
    main()
