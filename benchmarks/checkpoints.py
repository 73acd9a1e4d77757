"""Cost of checkpoints: a ResNet-101 with SGD momentum, saved by Samebits and by torch.save.

    python -m benchmarks.checkpoints
    python -m benchmarks.checkpoints --rounds 5 --block-s 10 --every 5s --folder ../slow-disk

First, how long a save blocks training: `CheckpointManager.save` (it copies; a thread writes and flushes) against
torch.save with fsync, in turn. Then the throughput with a save at a fixed interval: blocks of training without saves,
with Samebits's saves and with torch.save, in turn. One process, one thread, CPU; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.small_networks import job_of
from samebits.cluster.world import alone
from samebits.config.interval import parse_interval
from samebits.config.schema import CheckpointConfig
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.job import Job
from samebits.engine.step import run_step
from samebits.storage.run_folder import RunFolder


def steps_of(job: Job) -> Callable[[], None]:
    loader, steps = job.open_loader()

    def step() -> None:
        run_step(job, next(steps), loader)
        job.progress.step += 1

    return step


def plain_save(job: Job, file: Path) -> None:
    """Save as a hand-written job does."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as stream:
        torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare_holdups(
    job: Job, checkpoints: CheckpointManager, step: Callable[[], None], file: Path, rounds: int
) -> None:
    first = timed(lambda: checkpoints.save(job))
    checkpoints.wait()
    times = []
    for _ in range(rounds):
        step_s = timed(step)
        plain_s = timed(lambda: plain_save(job, file))
        ours_s = timed(lambda: checkpoints.save(job))
        beside_s = timed(step)
        times.append((plain_s, ours_s, ours_s + beside_s + timed(checkpoints.wait), step_s, beside_s))
    plain_s, ours_s, written_s, step_s, beside_s = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(row[1] / row[0] for row in times)
    num_bytes = sum(path.stat().st_size for path in checkpoints.folder.checkpoints.glob("step-*/*.safetensors"))
    print(f"a checkpoint has {num_bytes / len(list(checkpoints.folder.checkpoints.glob('step-*'))) / 2**20:.0f} MiB")
    print(f"{'':24}  blocked ms   on disk after ms")
    print(f"{'torch.save and fsync':24}  {plain_s * 1e3:10.0f}   {plain_s * 1e3:10.0f}")
    print(f"{'Samebits':24}  {ours_s * 1e3:10.0f}   {written_s * 1e3:10.0f}     ratio {ratio:.3f} = 1/{1 / ratio:.0f}")
    print(f"{'Samebits, first save':24}  {first * 1e3:10.0f}     (allocates memory for the copies)")
    print(f"the next step: {beside_s * 1e3:.0f} ms during the write, {step_s * 1e3:.0f} ms without", flush=True)


def compare_throughput(
    job: Job, checkpoints: CheckpointManager, step: Callable[[], None], file: Path, arguments: argparse.Namespace
) -> None:
    every_s = parse_interval(arguments.every).seconds
    assert every_s is not None

    def block(kind: str) -> float:
        start = saved_at = time.perf_counter()
        num_steps = 0
        while time.perf_counter() - start < arguments.block_s:
            step()
            num_steps += 1
            if kind == "plain" and time.perf_counter() - saved_at >= every_s:
                saved_at = time.perf_counter()
                plain_save(job, file)
            if kind == "samebits" and checkpoints.is_due(job):
                checkpoints.save(job)
        rate = num_steps * arguments.batch / (time.perf_counter() - start)
        checkpoints.wait()  # what is still being written then would be written beside the next steps
        return rate

    kinds = ("none", "samebits", "plain")
    rates = [[block(kind) for kind in kinds] for _ in range(arguments.rounds)]
    print(f"\nsamples/s, saving every {arguments.every}, {arguments.rounds} blocks of {arguments.block_s:.0f} s each")
    for column, kind in enumerate(kinds):
        ratio = statistics.median(row[column] / row[0] for row in rates)
        print(f"{kind:10} {statistics.median(row[column] for row in rates):8.1f}   x {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block-s", type=float, default=12.0)
    parser.add_argument("--every", default="2s")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="folder for checkpoints; default: a temporary folder")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = RunFolder(Path(place))
        folder.open()
        batch = arguments.batch
        job = job_of("resnet101-32", alone("cpu"), num_samples=256, global_batch=batch, micro_batch=batch)
        step = steps_of(job)
        step()  # the optimizer has its state from here on
        checkpoints = CheckpointManager(folder, CheckpointConfig(every=arguments.every, keep=2), job.world)
        print(f"torch {torch.__version__}, ResNet-101 with momentum, steps of {arguments.batch} images, 1 thread")
        compare_holdups(job, checkpoints, step, Path(place) / "plain.pt", arguments.rounds)
        compare_throughput(job, checkpoints, step, Path(place) / "plain.pt", arguments)
        folder.close()


if __name__ == "__main__":
    main()
