"""Cost and accuracy of portable arithmetic: `kernels=portable` beside `kernels=auto`, on a CPU, one process and thread.

    python -m benchmarks.portable                                 # time of a step, and peak memory
    python -m benchmarks.portable --unit float64                  # as on a processor without int8 units
    python -m benchmarks.portable --parts table                   # hashes of recipes in many environments
    python -m benchmarks.portable --parts gradients               # errors of ResNet-18's gradients against float64
    python -m benchmarks.portable --parts training --train mnist data.root=DIR epochs=1     # accuracy over seeds

Steps are those of the engine, on random images, and take turns in one process, so that other programs slow both. The
table has medians, and the medians of the ratios of neighboring steps, of CPU time (which other programs affect less)
and of elapsed time. Memory is measured in processes that compute one way only.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from benchmarks.kernels import processor
from benchmarks.small_networks import job_of
from samebits.cluster.world import alone
from samebits.engine.step import run_step
from samebits.portable import products
from samebits.portable.arithmetic import portable_arithmetic, use_portable_arithmetic
from tests.lab.portable_runs import RECIPES, ROWS, print_table

KERNELS = ("auto", "portable")
# Samples of a step and of a micro-batch, as the recipes have them.
BATCHES = {"digits": (64, 8), "mnist": (128, 64), "resnet18-64": (32, 16), "vit-64": (32, 16)}


def use_unit(unit: str) -> str:
    """Compute products by one unit, or by the faster one; return which it is."""
    if unit != "auto":
        products._int8_is_faster = lambda device: unit == "int8"  # type: ignore[assignment]
    return "int8" if products._int8_is_faster("cpu") else "float64"


def steps(name: str, kernels: str) -> Iterator[tuple[float, float]]:
    """Train, and yield CPU time and elapsed time of each step, in seconds."""
    global_batch, micro_batch = BATCHES[name]
    torch.manual_seed(0)
    job = job_of(
        name, alone("cpu"), num_samples=global_batch, global_batch=global_batch, micro_batch=micro_batch,
        kernels=kernels,
    )  # fmt: skip
    loader, planned = job.open_loader(10**6)
    for step in planned:
        use_portable_arithmetic(kernels == "portable")
        cpu, start = time.process_time(), time.perf_counter()
        run_step(job, step, loader)
        yield time.process_time() - cpu, time.perf_counter() - start


def by_turns(name: str, unit: str, rounds: int) -> list[list[tuple[float, float]]]:
    """Return the times of steps by both ways in each round."""
    torch.set_num_threads(1)
    use_unit(unit)
    ways = [steps(name, kernels) for kernels in KERNELS]
    return [[next(way) for way in ways] for _ in range(rounds + 2)][2:]  # the first ones allocate


def memory(name: str, unit: str, kernels: str) -> tuple[float, float]:
    """Return peak memory, and how much of it came with the network and its steps, in MB."""
    torch.set_num_threads(1)
    use_unit(unit)
    start = _peak_mb()
    way = steps(name, kernels)
    for _ in range(3):
        next(way)
    return _peak_mb(), _peak_mb() - start


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def print_costs(names: Sequence[str], unit: str, rounds: int) -> None:
    print(
        "| network | auto, ms of CPU time | portable | ratio | of elapsed time | memory, MB | ratio | of steps alone |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        times = in_new_process(by_turns, name, unit, rounds)
        auto, portable = (statistics.median(row[way][0] for row in times) * 1e3 for way in (0, 1))
        cpu, elapsed = (statistics.median(row[1][kind] / row[0][kind] for row in times) for kind in (0, 1))
        used = [in_new_process(memory, name, unit, kernels) for kernels in KERNELS]
        ratios = [portable / auto for auto, portable in zip(*used, strict=True)]
        print(
            f"| {name} | {auto:.1f} | {portable:.1f} | {cpu:.2f} | {elapsed:.2f} | {used[0][0]:.0f} and "
            f"{used[1][0]:.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |",
            flush=True,
        )


class Choices:
    """Where ReLUs and maxima of a network choose, in the order of their calls.

    Args:
        model: Its choices are recorded.
        taken: Choices of another run, which this one takes over: ReLUs become products with zeros and ones, maxima
            copies of given pixels. So two runs differ by rounding only, and not by a ReLU that flips near zero.
    """

    def __init__(self, model: nn.Module, taken: Choices | None = None) -> None:
        self.made: list[Tensor] = []
        self._taken = None if taken is None else iter(taken.made)
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False
                module.register_forward_hook(self._relu)
            elif isinstance(module, nn.MaxPool2d):
                module.register_forward_hook(self._maxima)

    def _relu(self, module: nn.ReLU, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        self.made.append(inputs[0] > 0)
        return None if self._taken is None else inputs[0] * next(self._taken)

    def _maxima(self, module: nn.MaxPool2d, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        found = F.max_pool2d(inputs[0].detach(), module.kernel_size, module.stride, module.padding, return_indices=True)
        self.made.append(found[1])
        if self._taken is None:
            return None
        return inputs[0].flatten(2).gather(2, next(self._taken).flatten(2)).view_as(output)

    def flips(self, other: Choices) -> int:
        """How many choices differ."""
        return sum(int((one != two).sum()) for one, two in zip(self.made, other.made, strict=True))


def gradients(
    model: nn.Module, x: Tensor, y: Tensor, mode: AbstractContextManager[None], taken: Choices | None = None
) -> tuple[list[Tensor], Choices]:
    model = copy.deepcopy(model).to(x.dtype)
    choices = Choices(model, taken)
    with mode:
        loss = F.cross_entropy(model(x), y)
        return list(torch.autograd.grad(loss, list(model.parameters()))), choices


def relative_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one.double() - two).norm() / two.norm()) for one, two in zip(found, exact, strict=True)]


def print_gradient_errors(batches: int) -> None:
    """Print relative errors of each layer's gradient in ResNet-18, medians over batches of 16 images.

    They are those against float64, and those against float64 with the ReLUs and maxima of the run itself.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    names = [name for name, _ in model.named_parameters()]
    ways = [*KERNELS, *(f"{kernels}, no flips" for kernels in KERNELS)]
    errors: dict[str, list[list[float]]] = {way: [] for way in ways}
    flips: dict[str, list[int]] = {way: [] for way in ways}
    for _ in range(batches):
        x, y = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
        exact, right = gradients(model, x.double(), y, nullcontext())
        for kernels, mode in zip(KERNELS, (nullcontext(), portable_arithmetic()), strict=True):
            found, choices = gradients(model, x, y, mode)
            same, _ = gradients(model, x.double(), y, nullcontext(), choices)
            for way, reference in ((kernels, exact), (f"{kernels}, no flips", same)):
                errors[way].append(relative_errors(found, reference))
                flips[way].append(choices.flips(right) if way == kernels else 0)
    medians = {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in errors.items()}

    def row(title: str, cells: Iterable[str]) -> None:
        print(f"| {title} | {' | '.join(cells)} |")

    row(f"relative error, {batches} batches of 16 x 64 px", ways)
    print("|---" * (len(ways) + 1) + "|")
    for number, name in enumerate(names):
        if name.endswith("weight") and ("conv" in name or "fc" in name):
            row(name, (f"{medians[way][number]:.1e}" for way in ways))
    for title, pick in (("median layer", statistics.median), ("worst layer", max)):
        row(title, (f"{pick(medians[way]):.1e}" for way in ways))
    row("largest error of any layer and batch", (f"{max(map(max, errors[way])):.1e}" for way in ways))
    row("ReLUs and maxima that flipped, median and most of a batch",
        (f"{statistics.median(flips[way]):g}, {max(flips[way])}" for way in ways))  # fmt: skip


def accuracy(recipe: Sequence[str], kernels: str, seed: int) -> float:
    """Train a recipe, and return the final accuracy in percent."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"kernels={kernels}", f"seed={seed}", "--procs", "1", "--run-dir", f"{folder}/run"]
        subprocess.run([sys.executable, "-m", "samebits", "train", *recipe, *settings], check=True, capture_output=True)
        return 100 * float(json.loads(Path(folder, "run", "result.json").read_text())["metrics"]["top1"])


def print_accuracies(recipe: Sequence[str], seeds: int) -> None:
    """Print the accuracy of a recipe by seed, and the difference of the means with its standard error."""
    print(f"| {' '.join(recipe)} | auto, top-1 % | portable |\n|---|---|---|")
    rows = []
    for seed in range(seeds):
        rows.append([accuracy(recipe, kernels, seed) for kernels in KERNELS])
        print(f"| seed {seed} | {rows[-1][0]:.2f} | {rows[-1][1]:.2f} |", flush=True)
    auto, portable = zip(*rows, strict=True)
    print(f"| mean | {statistics.mean(auto):.3f} | {statistics.mean(portable):.3f} |")
    differences = [two - one for one, two in rows]
    apart, paired = standard_error(seeds, auto, portable), standard_error(seeds, differences)
    print(f"difference {statistics.mean(differences):+.3f}, its standard error {apart:.3f}; of pairs {paired:.3f}")


def standard_error(seeds: int, *columns: Sequence[float]) -> float:
    """The standard error of a difference of means, or of a mean."""
    return math.sqrt(sum(map(statistics.variance, columns)) / seeds) if seeds > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("cost", "gradients", "training", "table"), default=["cost"])
    parser.add_argument("--networks", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--unit", choices=("auto", "int8", "float64"), default="auto", help="of products; auto: the faster one"
    )
    parser.add_argument("--batches", type=int, default=20, help="of the part gradients")
    parser.add_argument("--train", nargs="+", default=["digits"], metavar="SETTING", help="recipe and settings")
    parser.add_argument("--seeds", type=int, default=5, help="of the part training")
    arguments = parser.parse_args()
    unit = use_unit(arguments.unit)
    print(f"{processor()}, torch {torch.__version__}, 1 thread; large products by {unit}\n", flush=True)
    if "cost" in arguments.parts:
        print_costs(arguments.networks, arguments.unit, arguments.rounds)
    if "gradients" in arguments.parts:
        print_gradient_errors(arguments.batches)
    if "training" in arguments.parts:
        print_accuracies(arguments.train, arguments.seeds)
    if "table" in arguments.parts and not print_table(RECIPES, ROWS):
        raise SystemExit("portable arithmetic has several hashes")


if __name__ == "__main__":
    main()
