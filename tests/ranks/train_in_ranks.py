"""A small run of a recipe's parts, as a rank of a rank pool carries it out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.engine.assemble import make_job
from samebits.engine.checkpoints.saving import CheckpointManager
from samebits.engine.loop import train
from samebits.engine.parts import Parts
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256
from tests.ranks.runs_in_ranks import Quiet


class Losses(Quiet):
    """Remembers the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def step(self, *arguments: Any) -> None:
        self.losses.append(arguments[2].loss)


def train_parts(world: World, path: Path, config: RunConfig, build: Callable[[], Parts], stop_at: int) -> Any:
    """Train until the end, or until after step `stop_at`: hash of the weights, figures, losses, whether it is done."""
    folder = RunFolder(path)
    if world.is_main:
        folder.open()
    told = Losses()
    job = make_job(config, build, world)
    try:
        saver = CheckpointManager(folder, config.checkpoint, world)
        saver.restore(job, "auto", told.notify)
        is_done = train(job, saver, told, lambda: float(job.progress.step == stop_at))
        saver.close()
        return weights_sha256(job.state()), job.progress.metrics, told.losses, is_done
    finally:
        torch.use_deterministic_algorithms(False)
        folder.close()
