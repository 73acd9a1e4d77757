"""Make a synthetic dataset: class folders of JPEG images of shapes with random sizes, positions and strong colors."""

import shlex
from pathlib import Path

import numpy as np

from samebits.recipes.classify.config import MakeConfig
from samebits.recipes.synthetic_shapes import SHAPES, draw_shape


def make(config: MakeConfig, out: Path) -> str:
    """Write the dataset into an empty folder. Returns a summary for the user, with the command that trains on it."""
    for number, (name, outline) in enumerate(SHAPES.items()):
        folder = out / name
        folder.mkdir(parents=True)
        for index in range(config.num_per_class):
            random = np.random.default_rng([config.seed, number, index])
            draw_shape(outline, config.size_px, random).save(folder / f"{index:04}.jpg", quality=88)
    total = len(SHAPES) * config.num_per_class
    command = shlex.join(["samebits", "train", "classify/shapes", f"data.root={out}"])
    return f"{total:,} images of {len(SHAPES)} shapes; train with   {command}"
