"""Cost of `samebits launch`: a step of an unmodified DistributedDataParallel script, started by it and by torchrun.

    python -m benchmarks.launched
    python -m benchmarks.launched --procs 2 4 --models resnet18 cnn --turns 3 --steps 40

The two take turns. Prints the median over rank 0's steps of the time and of the CPU time, which other programs affect
less, the time from the command to the end of the first step, and their ratios. ResNet-18, or a CNN of three layers with
batch norm, on images of 64 pixels, CPU, gloo, one thread and a batch of 16 samples for each process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 16


def cnn() -> nn.Module:
    """Return a network whose step takes a few milliseconds, so that what a launcher adds to it shows."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 16, 32, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resnet18() -> nn.Module:
    return torchvision.models.resnet18(num_classes=10)


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet18": resnet18, "cnn": cnn}


def script(num_steps: int, model_name: str) -> None:
    """Run the script in this process: one epoch of equal steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    num_samples = BATCH * dist.get_world_size() * num_steps
    data = TensorDataset(torch.randn(num_samples, 3, 64, 64), torch.arange(num_samples) % 10)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    model = DistributedDataParallel(MODELS[model_name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    times = []
    first = 0.0
    for x, y in loader:
        times.append((time.perf_counter(), time.process_time()))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        first = first or time.time()
    if dist.get_rank() == 0:
        pairs = list(itertools.pairwise(times[5:]))  # the first ones allocate
        steps = [[after[kind] - before[kind] for before, after in pairs] for kind in (0, 1)]
        print(json.dumps([*steps, [first]]))
    dist.destroy_process_group()


def measure(launcher: list[str], procs: int, num_steps: int, model: str) -> list[list[float]]:
    """Return rank 0's seconds of each step: of time, and of CPU time; and those until the first one has ended."""
    flags = ["--standalone", f"--nproc-per-node={procs}"]
    work = ["-m", "benchmarks.launched", "--script", str(num_steps), "--models", model]
    command = [sys.executable, "-m", *launcher, *flags, *work]
    began = time.time()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: list[list[float]] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    return [*found[:2], [found[2][0] - began]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[2])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["resnet18"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--script", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.script:
        script(given.script, given.models[0])
        return
    for model, procs in itertools.product(given.models, given.procs):
        compare(model, procs, given.turns, given.steps)


def compare(model: str, procs: int, num_turns: int, num_steps: int) -> None:
    """Let both launchers take turns with a model, and print their times."""
    forms = {"torchrun": ["torch.distributed.run"], "samebits launch": ["samebits", "launch"]}
    seconds: dict[str, list[list[float]]] = {form: [[], [], []] for form in forms}
    for turn in range(num_turns):
        for form in list(forms)[:: -1 if turn % 2 else 1]:
            found = measure(forms[form], procs, num_steps, model)
            for all_steps, steps in zip(seconds[form], found, strict=True):
                all_steps += steps
    for number, kind in enumerate(("time of a step", "CPU time of a step", "time to the end of the first step")):
        usual_s, exact_s = (statistics.median(seconds[form][number]) for form in forms)
        print(
            f"{model}, {procs} processes, {kind}: torchrun {usual_s * 1e3:.1f} ms, "
            f"samebits launch {exact_s * 1e3:.1f} ms, ratio {exact_s / usual_s:.3f}"
        )


if __name__ == "__main__":
    main()
