"""A small run of the segment recipe, as a rank of a rank pool carries it out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from samebits.cluster.world import World
from samebits.recipes.segment.config import Config
from samebits.recipes.segment.recipe import build, dataset_info
from tests.ranks.train_in_ranks import train_parts


def settings(root: Path, num_workers: int = 0) -> Config:
    """Two epochs of four steps over 22 of 27 images, all of the augmentation on."""
    return Config.model_validate_json(
        json.dumps(
            {
                "recipe": "segment", "epochs": 2, "global_batch": 6, "micro_batch": 2, "eval_batch": 2,
                "device": "cpu", "data": {"root": str(root), "size_px": 32}, "model": {"width": 4},
                "loader": {"num_workers": num_workers}, "checkpoint": {"every": "3 steps"},
                "optim": {"name": "adamw", "lr": 1e-3, "schedule": "cosine"}, "loss": {"dice": 1.0},
            }
        )
    )  # fmt: skip


def carry_out(world: World, path: Path, config: Config, stop_at: int = -1) -> Any:
    """As `train_parts`."""
    return train_parts(world, path, config, partial(build, config, dataset_info(config)), stop_at)
