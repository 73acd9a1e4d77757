"""A small run of the text recipe on images of three widths, as a rank of a rank pool runs it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from samebits.cluster.world import World
from samebits.config.sections import CheckpointConfig, LoaderConfig
from samebits.recipes.text.config import Config
from samebits.recipes.text.recipe import build, dataset_info
from tests.ranks.train_in_ranks import train_parts


def draw_digits(folder: Path, num_lines: int) -> None:
    """Lines of one to five digits as l.tsv; each digit is four bars, light or dark: no font is needed."""
    rng = np.random.default_rng(0)
    labels = []
    for number in range(num_lines):
        digits = rng.integers(0, 10, 1 + number % 5)
        bars = [[40 + 170 * (digit >> bit & 1) for bit in range(4)] for digit in digits.tolist()]
        line = np.concatenate([np.repeat(np.repeat([bar], 4, axis=1), 26, axis=0) for bar in bars], axis=1)
        picture = np.full((32, 6 + 20 * len(digits)), 128, np.uint8)
        for place in range(len(digits)):
            picture[3:29, 6 + 20 * place : 22 + 20 * place] = line[:, 16 * place : 16 * place + 16]
        Image.fromarray(picture).save(folder / f"{number}.png")
        labels.append(f"{number}.png\t{''.join(map(str, digits.tolist()))}\n")
    (folder / "l.tsv").write_text("".join(labels))


def settings(folder: Path, *, num_workers: int = 0, name: str = "fast", **more: Any) -> Config:
    """Two epochs over 43 lines in groups of 15, 17 and 11; some micro-batches are smaller than others."""
    data = {
        "train": str(folder / "l.tsv"),
        "val_fraction": 0.15,
        "width": [40, 64, 100],
        "jitter": 0.5,
        **more.pop("data", {}),
    }
    return Config(
        recipe="text", epochs=more.pop("epochs", 2), global_batch=12, micro_batch=3, eval_batch=4, device="cpu",
        data=data, model={"name": name, "width": 4, "num_hidden": 8}, loader=LoaderConfig(num_workers=num_workers),
        checkpoint=CheckpointConfig(every="2 steps"), optim={"name": "adam", "lr": 3e-3}, **more,
    )  # fmt: skip


def carry_out(world: World, path: Path, config: Config, stop_at: int = -1) -> Any:
    """As `train_parts`."""
    return train_parts(world, path, config, partial(build, config, dataset_info(config)), stop_at)
