"""Accuracy after each epoch: the hand-written MNIST job, Samebits's preset of it, and the better preset.

    python benchmarks/mnist_accuracy.py --data FOLDER-WITH-MNIST-GZ
    python benchmarks/mnist_accuracy.py --data FOLDER --seeds 1 --only tutorial

The hand-written job is that of tutorials: DistributedDataParallel on 2 CPU processes, batch 64 each,
DistributedSampler with set_epoch, SGD with learning rate 0.01 and momentum 0.5. All jobs are evaluated on the 10,000
test images after each epoch. Prints the mean over the seeds in percent, and the seconds of training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from task import MEAN, STD, Net, optimizer

from samebits.recipes.mnist.config import DataConfig
from samebits.recipes.mnist.data import read_mnist

Figures = tuple[list[float], float]  # accuracy after each epoch, percent; seconds of training


def pictures(folder: Path, train: bool) -> TensorDataset:
    images, labels = read_mnist(DataConfig(name="mnist", root=folder, download=False), train=train)
    scaled = (torch.tensor(images)[:, None].float() / 255 - MEAN) / STD
    return TensorDataset(scaled, torch.tensor(labels).long())


def hand_written(rank: int, store: str, folder: Path, seed: int, epochs: int, answer: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    data, test = pictures(folder, True), pictures(folder, False)
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(Net())
    update = optimizer(model)
    accuracies, seconds = [], 0.0
    for epoch in range(epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            update.zero_grad()
            F.nll_loss(model(images), labels).backward()
            update.step()
        seconds += time.perf_counter() - began
        model.eval()
        with torch.no_grad():
            right = sum(
                int((model.module(images).argmax(1) == labels).sum())
                for images, labels in DataLoader(test, batch_size=1000)
            )
        accuracies.append(100 * right / len(test))
    if rank == 0:
        answer.write_text(json.dumps([accuracies, seconds]))
    dist.destroy_process_group()


def run_hand_written(folder: Path, seed: int, epochs: int) -> Figures:
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "figures.json"
        mp.spawn(hand_written, (f"{place}/store", folder, seed, epochs, answer), nprocs=2)
        accuracies, seconds = json.loads(answer.read_text())
    return accuracies, seconds


def run_samebits(preset: str, folder: Path, seed: int) -> Figures:
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        command = [sys.executable, "-m", "samebits", "train", preset, f"data.root={folder}", f"seed={seed}"]
        subprocess.run([*command, "--procs", "2", "--run-dir", run], check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = json.loads((run / "result.json").read_text())["seconds"]["training"]
    return [100 * record["top1"] for record in records if record["kind"] == "eval"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=["hand-written", "tutorial", "mnist"], default=None)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = arguments.data.resolve()
    jobs = {
        "hand-written": lambda seed: run_hand_written(folder, seed, 10),
        "tutorial": lambda seed: run_samebits("mnist/tutorial", folder, seed),
        "mnist": lambda seed: run_samebits("mnist", folder, seed),
    }
    for name in arguments.only or jobs:
        figures = [jobs[name](seed) for seed in arguments.seeds]
        means = [statistics.mean(column) for column in zip(*(accuracies for accuracies, _ in figures), strict=True)]
        seconds = [seconds for _, seconds in figures]
        print(
            f"{name:13}", " ".join(f"{mean:5.2f}" for mean in means), f"  {statistics.mean(seconds):.0f} s", flush=True
        )
        for seed, (accuracies, _) in zip(arguments.seeds, figures, strict=True):
            print(f"  seed {seed:6}", " ".join(f"{accuracy:5.2f}" for accuracy in accuracies), flush=True)


if __name__ == "__main__":
    main()
