"""A small run of the pose recipe, as a rank of a gang carries it out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.cluster.world import World
from lockstep.config.schema import CheckpointConfig
from lockstep.engine.loop import train
from lockstep.engine.run import make_job
from lockstep.engine.run_folder import RunFolder
from lockstep.engine.saving import Saver
from lockstep.engine.weights import weights_sha256
from lockstep.recipes.pose.config import Config, DataConfig, ModelConfig, TestConfig
from lockstep.recipes.pose.recipe import build
from tests.ranks.runs_in_ranks import Quiet


def settings(**more: Any) -> Config:
    """Two epochs of five steps; all of the augmentation is on."""
    data = {"size_px": 64, "num_train": 26, "num_eval": 3, "max_people": 4, "sigma": 1.0, **more.pop("data", {})}
    small = ModelConfig(width=4, num_modules=(1, 1, 1), num_blocks=1, stem_width=8, stem_blocks=1, deconv_blocks=1)
    return Config(
        recipe="pose", epochs=2, global_batch=6, micro_batch=2, eval_batch=2, device="cpu", model=small,
        data=DataConfig(**data), test=TestConfig(flip=False), checkpoint=CheckpointConfig(every="3 steps"),
        optim={"name": "adam", "lr": 1e-3, "schedule": "multi_step", "milestones": [1]}, **more,
    )  # fmt: skip


class Losses(Quiet):
    """Remembers the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def step(self, *arguments: Any) -> None:
        self.losses.append(arguments[2].loss)


def carry_out(world: World, path: Path, config: Config, stop_at: int = -1) -> Any:
    """Train until the end, or until after step `stop_at`: hash of the weights, figures, losses, whether it is done."""
    folder = RunFolder(path)
    if world.is_main:
        folder.open()
    told = Losses()
    job = make_job(config, partial(build, config), world)
    try:
        saver = Saver(folder, config.checkpoint, world)
        saver.restore(job, "auto", told.say)
        is_done = train(job, saver, told, lambda: float(job.progress.step == stop_at))  # type: ignore[arg-type]
        saver.close()
        return weights_sha256(job.model.state_dict()), job.progress.metrics, told.losses, is_done
    finally:
        torch.use_deterministic_algorithms(False)
        folder.close()
