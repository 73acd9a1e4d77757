"""A small run of the classify recipe, as a rank of a gang carries it out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.cluster.world import World
from lockstep.config.schema import CheckpointConfig, LoaderConfig
from lockstep.engine.loop import train
from lockstep.engine.parts import Parts
from lockstep.engine.run import make_job
from lockstep.engine.run_folder import RunFolder
from lockstep.engine.saving import Saver
from lockstep.engine.weights import weights_sha256
from lockstep.recipes.classify.config import Config
from lockstep.recipes.classify.recipe import build, facts
from tests.ranks.pose_in_ranks import Losses


class Small(nn.Module):
    """Two convolutions with batch norm; the input path is what is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits


def settings(root: Path, *, num_workers: int = 0, **more: Any) -> Config:
    """Two epochs of ten steps over 80 of 100 pictures, all of the augmentation on."""
    data = {"root": root, "size_px": 32, **more.pop("data", {})}
    return Config(
        recipe="classify", epochs=2, global_batch=8, micro_batch=3, eval_batch=8, device="cpu", data=data,
        loader=LoaderConfig(num_workers=num_workers), checkpoint=CheckpointConfig(every="3 steps"),
        optim={"lr": 0.05, "schedule": "cosine"}, loss={"label_smoothing": 0.1}, **more,
    )  # fmt: skip


def carry_out(world: World, path: Path, config: Config, stop_at: int = -1, small: bool = True) -> Any:
    """Train until the end, or until after step `stop_at`: hash of the weights, figures, losses, whether it is done."""
    folder = RunFolder(path)
    if world.is_main:
        folder.open()
    told = Losses()

    def parts() -> Parts:
        built = build(config, facts(config))
        return replace(built, model=Small()) if small else built

    job = make_job(config, parts, world)
    try:
        saver = Saver(folder, config.checkpoint, world)
        saver.restore(job, "auto", told.say)
        is_done = train(job, saver, told, lambda: float(job.progress.step == stop_at))  # type: ignore[arg-type]
        saver.close()
        return weights_sha256(job.model.state_dict()), job.progress.metrics, told.losses, is_done
    finally:
        torch.use_deterministic_algorithms(False)
        folder.close()
