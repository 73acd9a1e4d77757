"""Measure the parts of a step in a few processes of this machine, which compute at the same time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from samebits.cluster import collectives
from samebits.cluster.env import ALONE, RankAssignment, read_assignment
from samebits.cluster.world import World, alone
from samebits.config.load import load
from samebits.config.schema import RunConfig
from samebits.engine.assemble import make_job
from samebits.engine.build import open_data
from samebits.engine.dataset_info import dataset_info_for
from samebits.engine.job import Job
from samebits.engine.parts import Parts
from samebits.engine.step import run_step
from samebits.errors import ConfigError
from samebits.launch.start import join_world
from samebits.parallel.exchange.link import Link, measure_link, measure_message_s
from samebits.recipes.catalog import find
from samebits.scaling.measure import WARM_STEPS, TimedLoader
from samebits.scaling.step_time.model import StepCosts

MICRO_BATCHES = 2  # of a measured step, at most
ADDED_BYTES = 16 * 1024 * 1024  # more than a core's caches
MIN_STEPS, MIN_S = 5, 2.0


def measure_costs(source: str, overrides: list[str], out: Path, assignment: RankAssignment | None = None) -> int:
    """Measure the costs of one process, while the other ranks do the same; rank 0 writes the medians to `out`.

    Args:
        source: The recipe.
        overrides: Its settings.
        out: Path of the JSON file: the costs, and the number of training samples.
        assignment: Rank of this process and its world. None: read from the environment.

    Returns:
        The exit code, 0.
    """
    found = find(source)
    config = load(found.config_class, found.layers, overrides).config
    with join_world(assignment or read_assignment(os.environ) or ALONE, config) as world:
        dataset_info = dataset_info_for(found, config, world, None)
        costs = passes_of(config, lambda: found.build(config, dataset_info), world)
        local, message_s = message_costs(world)
        costs = replace(costs, local=local, message_s=message_s)
        samples = len(open_data(config, found.build(config, dataset_info), train=True))
        if world.is_main:
            out.write_text(json.dumps({**costs_to_json(costs), "samples": samples}), encoding="utf-8")
    return 0


def message_costs(world: World, num_busy: int | None = None) -> tuple[Link | None, float]:
    """Measure messages between two processes of a world.

    Args:
        world: All of its ranks call this, and receive the same result.
        num_busy: None: messages between all ranks at the same time; otherwise between two.

    Returns:
        `local` and `message_s` of StepCosts; None and 0.0 in a world of one process.
    """
    if world.size == 1:
        return None, 0.0
    every_pair = num_busy is None
    return measure_link(world, every_pair=every_pair), measure_message_s(world, every_pair=every_pair)


def passes_of(config: RunConfig, build: Callable[[], Parts], world: World, num_busy: int | None = None) -> StepCosts:
    """Measure the costs of one process without messages.

    Args:
        config: The settings.
        build: Builds the recipe's parts.
        world: All of its ranks call this, and receive the medians over the busy ranks.
        num_busy: Ranks that compute at the same time; None: all.

    Raises:
        ConfigError: The training set has no full step.
    """
    num_micro = min(MICRO_BATCHES, max(1, config.global_batch // config.micro_batch))
    small = config.model_copy(update={"global_batch": num_micro * config.micro_batch, "epochs": 1_000_000})
    here = alone(world.device.type)
    mine: list[float] = []
    job = make_job(small, build, here)
    collectives.barrier(world, 600)
    if num_busy is None or world.rank < num_busy:
        mine = [*(median(each) for each in zip(*_timed(job, num_micro), strict=True)), _add_s_per_byte(world.device)]
    gathered = collectives.all_gather_object(world, mine)
    reading, compute, update, added = (median(each) for each in zip(*filter(None, gathered), strict=True))
    return StepCosts(reading, compute, update, added, None)


def _timed(job: Job, num_micro: int) -> list[tuple[float, float, float]]:
    """Return seconds of reading and computing a micro-batch, and of the update, for each full step."""
    loader, steps = job.open_loader()
    timed, activity = TimedLoader(loader), job.world.activity
    times: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    try:
        for step in steps:
            reading, work, started = timed.seconds, activity.work_s, time.perf_counter()
            run_step(job, step, timed, 0.0)  # type: ignore[arg-type]  # it has Loader's batch
            if job.world.device.type == "cuda":
                torch.cuda.synchronize(job.world.device)
            step_s, reading, work = time.perf_counter() - started, timed.seconds - reading, activity.work_s - work
            if step.number >= WARM_STEPS and step.num_micro_batches == num_micro:
                times.append((reading / num_micro, (work - reading) / num_micro, step_s - work))
            if len(times) >= MIN_STEPS and time.perf_counter() - began > MIN_S:
                break
    finally:
        loader.close()
    if not times:
        raise ConfigError(
            f"no step has {num_micro} full micro-batches of {job.config.micro_batch} samples after {WARM_STEPS} steps",
            given=f"training samples: {len(job.train_data)}",
            fix="Set a smaller micro_batch, or use more data.",
        )
    return times


def _add_s_per_byte(device: torch.device) -> float:
    one, other = (torch.ones(ADDED_BYTES // 4, device=device) for _ in range(2))
    times = []
    for _ in range(9):
        began = time.perf_counter()
        one.add_(other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times) / ADDED_BYTES


def costs_to_json(costs: StepCosts) -> dict[str, Any]:
    """Return costs as plain JSON."""
    return asdict(costs)


def costs_from_json(values: dict[str, Any]) -> StepCosts:
    """Return the costs of `costs_to_json`; further values are ignored."""
    local = values["local"]
    return StepCosts(
        reading_s=values["reading_s"],
        compute_s=values["compute_s"],
        update_s=values["update_s"],
        add_s_per_byte=values["add_s_per_byte"],
        local=Link(**local) if local else None,
        message_s=values["message_s"],
    )
