"""Cost of the sample order for one process: 100 million samples over 1,024 processes.

    python benchmarks/order.py
    python benchmarks/order.py --num-samples 1000000 --world-size 8

Prints the time until a process has its indices of an arbitrary step, the time of each following step, and the peak
memory of Python and numpy. For comparison: torch's DistributedSampler, which shuffles all indices in every process at
the start of every epoch, and cannot start within an epoch.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from types import SimpleNamespace

from torch.utils.data import DistributedSampler

from samebits.data.order import Order


def ours(num_samples: int, world_size: int, global_batch: int, micro_batch: int) -> None:
    order = Order(num_samples, global_batch, micro_batch, seed=1)
    place = SimpleNamespace(rank=world_size // 3, size=world_size)
    start = order.steps_per_epoch // 2
    times, per_step = [], []
    tracemalloc.start()
    for _ in range(20):
        began = time.perf_counter()
        steps = order.steps(place, start=start, stop=10 * order.steps_per_epoch)
        next(steps)
        times.append(time.perf_counter() - began)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for _ in range(20):
        steps = order.steps(place, start=start, stop=10 * order.steps_per_epoch)
        began = time.perf_counter()
        for _ in range(256):
            next(steps)
        per_step.append((time.perf_counter() - began) / 256)
    print(
        f"samebits Order         {statistics.median(times) * 1e3:10.2f} ms to the first step of any epoch, "
        f"{statistics.median(per_step) * 1e6:.1f} us a step, {peak / 1e6:,.2f} MB"
    )


def torchs(num_samples: int, world_size: int) -> None:
    sampler = DistributedSampler(range(num_samples), num_replicas=world_size, rank=world_size // 3, shuffle=True)
    tracemalloc.start()
    began = time.perf_counter()
    next(iter(sampler))
    seconds = time.perf_counter() - began
    _, peak = tracemalloc.get_traced_memory()
    print(f"torch DistributedSampler {seconds * 1e3:8.0f} ms to the first step of each epoch, {peak / 1e6:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-samples", type=int, default=100_000_000)
    parser.add_argument("--world-size", type=int, default=1024)
    parser.add_argument("--global-batch", type=int, default=32_768)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument(
        "--torch-samples", type=int, default=10_000_000, help="samples for DistributedSampler, which is slow"
    )
    arguments = parser.parse_args()
    print(f"{arguments.num_samples:,} samples, {arguments.world_size:,} processes")
    ours(arguments.num_samples, arguments.world_size, arguments.global_batch, arguments.micro_batch)
    print(f"{arguments.torch_samples:,} samples")
    torchs(arguments.torch_samples, arguments.world_size)


if __name__ == "__main__":
    main()
