"""A small run of the classify recipe, as a rank of a rank pool carries it out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.config.sections import CheckpointConfig, LoaderConfig
from samebits.engine.parts import Parts
from samebits.recipes.classify.config import Config
from samebits.recipes.classify.recipe import build, dataset_info
from tests.ranks.train_in_ranks import train_parts


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
    """As `train_parts`, with a small network or the recipe's own."""

    def parts() -> Parts:
        built = build(config, dataset_info(config))
        return replace(built, model=Small()) if small else built

    return train_parts(world, path, config, parts, stop_at)
