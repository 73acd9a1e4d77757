"""The largest micro-batch that fits into memory: a few steps of some sizes, each in new processes.

Only activations grow with the micro-batch, so the peak is about a line. The next size is where the line meets the
limit, but at most four times the largest size that fit: one that is far too large could take the memory of other
programs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from samebits.cluster import collectives
from samebits.cluster.env import ALONE, RankAssignment, read_assignment
from samebits.config.load import load
from samebits.engine.assemble import init_weights, make_job
from samebits.engine.dataset_info import dataset_info_for
from samebits.engine.step import run_step
from samebits.errors import is_out_of_memory
from samebits.launch.start import join_world
from samebits.recipes.catalog import find

NUM_STEPS = 3  # the optimizer's state exists from the first update on
_MOST_TRIALS = 12
_GROWTH = 4
_FAR = 0.8
_GPU_SHARE, _CPU_SHARE = 0.95, 0.8  # of the memory that is free, by default

# A size -> its peak in bytes; None if memory ran out.
Trial = Callable[[int], int | None]


def largest_that_fits(trial: Trial, first: int, most: int, limit: int) -> int:
    """Search for the largest size whose measured peak is within a limit.

    Args:
        trial: Measures a size.
        first: The first size.
        most: The largest size that makes sense.
        limit: The limit in bytes.

    Returns:
        The size; 0 if none fits.
    """
    peaks: dict[int, int | None] = {}
    best, too_large, size = 0, most + 1, min(first, most)
    while size not in peaks and len(peaks) < _MOST_TRIALS:
        peaks[size] = peak = trial(size)
        if peak is not None and peak <= limit:
            best = max(best, size)
        else:
            too_large = min(too_large, size)
        size = _next_size(peaks, best, too_large, limit)
    return best


def _next_size(peaks: dict[int, int | None], best: int, too_large: int, limit: int) -> int:
    """Return the next size to measure; one that was measured, if none can be better."""
    if best + 1 >= too_large:
        return max(1, best)
    known = sorted((size, peak) for size, peak in peaks.items() if peak is not None)
    size = max(1, too_large // 2) if not best else 2 * best
    if len(known) > 1:
        (low, low_peak), (high, high_peak) = known[0], known[-1]
        slope = (high_peak - low_peak) / (high - low)
        if slope > 0:
            size = int(high + (limit - high_peak) / slope)
        if high == best and high_peak < _FAR * limit:  # two peaks that hardly differ give no line
            size = max(size, 2 * best)
    if best and size >= too_large:  # memory ran out before the line met the limit
        size = (best + too_large) // 2
    return max(best + 1, min(size, too_large - 1, _GROWTH * best if best else too_large))


def measure(source: str, overrides: list[str], out: Path, assignment: RankAssignment | None = None) -> int:
    """Train some steps as one process of a world; rank 0 writes the largest peak of a rank to `out`.

    Args:
        source: The recipe.
        overrides: Its settings, with the micro-batch.
        out: Path of the JSON file: "peak" and "limit" in bytes; the peak is null if memory ran out.
        assignment: Rank of this process and its world. None: read from the environment.

    Returns:
        The exit code, 0.
    """
    found = find(source)
    config = load(found.config_class, found.layers, overrides).config
    with join_world(assignment or read_assignment(os.environ) or ALONE, config) as world:
        limit = _limit(world.device, world.num_ranks_here)
        try:
            dataset_info = dataset_info_for(found, config, world, None)
            job = make_job(config, lambda: found.build(config, dataset_info), world)
            init_weights(job, lambda: found.build(config, dataset_info))
            loader, steps = job.open_loader(stop=NUM_STEPS)
            try:
                for step in steps:
                    run_step(job, step, loader, 0.0)
            finally:
                loader.close()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # The other ranks wait for this one, so it cannot report to them.
            out.write_text(json.dumps({"peak": None, "limit": limit}), encoding="utf-8")
            raise
        peaks = collectives.all_gather_object(world, _peak(world.device))
        if world.is_main:
            out.write_text(json.dumps({"peak": max(peaks), "limit": limit}), encoding="utf-8")
    return 0


def _peak(device: torch.device) -> int:
    """Return the largest memory that this process had so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return _kilobytes("/proc/self/status", "VmHWM")


def _limit(device: torch.device, num_ranks_here: int) -> int:
    """Return the memory that a process may have, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_GPU_SHARE * free)
    return int(_CPU_SHARE * _kilobytes("/proc/meminfo", "MemAvailable") / num_ranks_here)


def _kilobytes(path: str, name: str) -> int:
    with open(path, encoding="ascii") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])
