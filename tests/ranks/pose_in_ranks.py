"""A small run of the pose recipe, as a rank of a rank pool carries it out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from samebits.cluster.world import World
from samebits.config.sections import CheckpointConfig
from samebits.recipes.pose.config import Config, DataConfig, ModelConfig, TestConfig
from samebits.recipes.pose.recipe import build
from tests.ranks.train_in_ranks import train_parts


def settings(**more: Any) -> Config:
    """Two epochs of five steps; all of the augmentation is on."""
    data = {"size_px": 64, "num_train": 26, "num_eval": 3, "max_people": 4, "sigma": 1.0, **more.pop("data", {})}
    small = ModelConfig(width=4, num_modules=(1, 1, 1), num_blocks=1, stem_width=8, stem_blocks=1, deconv_blocks=1)
    return Config(
        recipe="pose", epochs=2, global_batch=6, micro_batch=2, eval_batch=2, device="cpu", model=small,
        data=DataConfig(**data), test=TestConfig(flip=False), checkpoint=CheckpointConfig(every="3 steps"),
        optim={"name": "adam", "lr": 1e-3, "schedule": "multi_step", "milestones": [1]}, **more,
    )  # fmt: skip


def carry_out(world: World, path: Path, config: Config, stop_at: int = -1) -> Any:
    """As `train_parts`."""
    return train_parts(world, path, config, partial(build, config), stop_at)
