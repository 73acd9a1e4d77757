"""Bytes between two sites and accuracy of local steps, compared with plain training, on a part of MNIST.

    python -m benchmarks.local_steps --data FOLDER-WITH-MNIST-GZ
    python -m benchmarks.local_steps --data FOLDER --procs 4 --seeds 1 --num-train 8000

Each job trains the preset `mnist` (CNN with batch norm, SGD with momentum, one_cycle) on the first training images, on
`--procs` CPU processes, and is evaluated on the 10,000 test images. With local steps there are two sites; the bytes are
those that processes of different sites send each other, in both directions, counted where messages are posted. Plain
training has no sites, so the same processes count as two. "per step" is for one global batch. The first seed of each
job is trained again on one process, whose weights must have the same hash. Takes about 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.small_networks import plain_world, spawn
from samebits.cluster.world import World, alone
from samebits.config.load import load
from samebits.config.schema import RunConfig
from samebits.engine.assemble import init_weights, make_job
from samebits.engine.dataset_info import find_dataset_info
from samebits.engine.evaluate import evaluate
from samebits.engine.job import Job
from samebits.engine.step import run_step
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.local_steps.placement import SubWorld, place_sites
from samebits.recipes.catalog import find
from samebits.storage.weights import weights_sha256

SITES = 2
JOBS = {
    "plain": [],
    "every=4": ["sync.every=4"],
    "every=16": ["sync.every=16"],
    "every=16, reset": ["sync.every=16", "sync.inner_state=reset"],
    "every=16, DiLoCo": ["sync.every=16", "sync.outer_lr=0.7", "sync.outer_momentum=0.9"],
    "every=64": ["sync.every=64"],
    "every=64, DiLoCo": ["sync.every=64", "sync.outer_lr=0.7", "sync.outer_momentum=0.9"],
}


def make(world: World, overrides: list[str]) -> Job:
    """Return a job of the preset mnist with other settings, before its first step."""
    found = find("mnist")
    config: RunConfig = load(found.config_class, found.layers, overrides).config
    info = find_dataset_info(found, config)
    job = make_job(config, lambda: found.build(config, info), world)
    init_weights(job, lambda: found.build(config, info))
    return job


def train(world: World, overrides: list[str]) -> dict[str, Any]:
    """Train a job to its end; return top-1 in percent, hash, bytes sent to the other site, and seconds."""
    job = make(world, overrides)
    own_ranks, sent, post = place_sites(world, SITES).own_ranks, 0, tree_all_reduce.post

    def counted(here: World, messages: Any) -> Any:
        nonlocal sent
        for each in messages:
            peer = here.ranks[each.peer] if isinstance(here, SubWorld) else each.peer
            if not each.is_receive and peer not in own_ranks:
                sent += each.values.nbytes
        return post(here, messages)

    tree_all_reduce.post = counted  # type: ignore[assignment]
    began = time.perf_counter()
    loader, steps = job.open_loader()
    try:
        for step in steps:
            assert run_step(job, step, loader, 0.0).is_finite
    finally:
        loader.close()
        tree_all_reduce.post = post
    seconds = time.perf_counter() - began
    metrics, _ = evaluate(
        job.model, job.eval_data, world, loss=job.parts.loss, metric=job.parts.metric,
        batch_size=job.config.eval_batch, channels_last=job.config.channels_last,
    )  # fmt: skip
    sha256 = weights_sha256(job.model.state_dict())
    return {"top1": 100 * metrics["top1"], "sha256": sha256, "sent": sent, "seconds": seconds}


def work(rank: int, num_procs: int, jobs: list[list[str]], answers: Any) -> None:
    """Train all jobs as one process; rank 0 puts the results into a queue."""
    if num_procs == 1:
        answers.put([train(alone("cpu"), job) for job in jobs])
        return
    with plain_world(rank, num_procs) as world:
        results = []
        for job in jobs:
            result = train(world, job)
            total = torch.tensor(result["sent"])
            dist.all_reduce(total)
            results.append({**result, "sent": int(total)})
        if rank == 0:
            answers.put(results)


def main() -> None:
    """Train all jobs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four .gz files")
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--num-train", type=int, default=9600)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    shared = [
        f"data.root={arguments.data}", "data.download=false", f"data.num_train={arguments.num_train}",
        f"epochs={arguments.epochs}", "device=cpu", "loader.num_workers=0",
    ]  # fmt: skip
    jobs = [[*shared, *job, f"seed={seed}"] for seed in range(arguments.seeds) for job in JOBS.values()]
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    found: dict[int, list[dict[str, Any]]] = {}
    for num_procs, some in ((arguments.procs, jobs), (1, jobs[: len(JOBS)])):
        spawn(work, num_procs, num_procs, some, answers)
        found[num_procs] = answers.get()
    results = found[arguments.procs]
    num_steps = arguments.epochs * -(-arguments.num_train // 128)
    print(
        f"torch {torch.__version__}, {arguments.procs} processes, {arguments.num_train:,} images, "
        f"{arguments.epochs} epochs, {num_steps} steps of 128, {arguments.seeds} seeds"
    )
    print("| job | KB between sites per step | share of plain | top-1 % | of each seed | hash on 1 process |")
    print("|---|---|---|---|---|---|")
    plain = results[0]["sent"]
    for at, name in enumerate(JOBS):
        of_job = results[at :: len(JOBS)]
        accuracies = [result["top1"] for result in of_job]
        is_equal = found[1][at]["sha256"] == of_job[0]["sha256"]
        print(
            f"| {name} | {of_job[0]['sent'] / num_steps / 1e3:,.1f} | {of_job[0]['sent'] / plain:.1%} "
            f"| {statistics.mean(accuracies):.2f} | {', '.join(f'{each:.2f}' for each in accuracies)} "
            f"| {'equal' if is_equal else 'DIFFERENT'} |"
        )
    print(f"{sum(result['seconds'] for each in found.values() for result in each):.0f} s of training")


if __name__ == "__main__":
    main()
