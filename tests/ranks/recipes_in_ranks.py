"""Small runs of the recipes classify, text, pose and segment, as a rank of a rank pool carries them out."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.config.schema import CheckpointConfig, LoaderConfig, RunConfig
from samebits.engine.build import make_job
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.parts import Parts
from samebits.recipes.classify.config import Config as ClassifyConfig
from samebits.recipes.pose.config import Config as PoseConfig
from samebits.recipes.pose.config import DataConfig, ModelConfig, TestConfig
from samebits.recipes.segment.config import Config as SegmentConfig
from samebits.recipes.text.config import Config as TextConfig
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import weights_sha256
from tests.in_loop import train_alone
from tests.ranks.runs_in_ranks import Quiet
from tests.synthetic_people import with_people


class Small(nn.Module):
    """Two convolutions with batch norm, for classify; the input path is what is looked at."""

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


def classify(root: Path, *, num_workers: int = 0, **more: Any) -> ClassifyConfig:
    """Two epochs of ten steps over 80 of 100 pictures, all of the augmentation on."""
    data = {"root": root, "size_px": 32, **more.pop("data", {})}
    return ClassifyConfig(
        recipe="classify", epochs=2, global_batch=8, micro_batch=3, eval_batch=8, device="cpu", data=data,
        loader=LoaderConfig(num_workers=num_workers), checkpoint=CheckpointConfig(every="3 steps"),
        optim={"lr": 0.05, "schedule": "cosine"}, loss={"label_smoothing": 0.1}, **more,
    )  # fmt: skip


def draw_digits(folder: Path, num_lines: int = 50) -> None:
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


def text(folder: Path, *, num_workers: int = 0, name: str = "fast", **more: Any) -> TextConfig:
    """Two epochs over 43 lines in groups of 15, 17 and 11; some micro-batches are smaller than others."""
    data = {
        "train": str(folder / "l.tsv"), "val_fraction": 0.15, "width": [40, 64, 100], "jitter": 0.5,
        **more.pop("data", {}),
    }  # fmt: skip
    return TextConfig(
        recipe="text", epochs=more.pop("epochs", 2), global_batch=12, micro_batch=3, eval_batch=4, device="cpu",
        data=data, model={"name": name, "width": 4, "num_hidden": 8}, loader=LoaderConfig(num_workers=num_workers),
        checkpoint=CheckpointConfig(every="2 steps"), optim={"name": "adam", "lr": 3e-3}, **more,
    )  # fmt: skip


def pose(**more: Any) -> PoseConfig:
    """Two epochs of five steps; all of the augmentation is on."""
    data = {"size_px": 64, "num_train": 26, "num_eval": 3, "max_people": 4, "sigma": 1.0, **more.pop("data", {})}
    small = ModelConfig(width=4, num_modules=(1, 1, 1), num_blocks=1, stem_width=8, stem_blocks=1, deconv_blocks=1)
    return PoseConfig(
        recipe="pose", epochs=more.pop("epochs", 2), global_batch=6, micro_batch=2, eval_batch=2, device="cpu",
        model=small, data=DataConfig(**data), test=TestConfig(flip=False),
        checkpoint=CheckpointConfig(every="3 steps"),
        optim={"name": "adam", "lr": 1e-3, "schedule": "multi_step", "milestones": [1]}, **more,
    )  # fmt: skip


def segment(root: Path, *, num_workers: int = 0) -> SegmentConfig:
    """Two epochs of four steps over 22 of 27 images, all of the augmentation on."""
    return SegmentConfig.model_validate(
        {
            "recipe": "segment", "epochs": 2, "global_batch": 6, "micro_batch": 2, "eval_batch": 2,
            "device": "cpu", "data": {"root": root, "size_px": 32}, "model": {"width": 4},
            "loader": {"num_workers": num_workers}, "checkpoint": {"every": "3 steps"},
            "optim": {"name": "adamw", "lr": 1e-3, "schedule": "cosine"}, "loss": {"dice": 1.0},
        }
    )  # fmt: skip


class Losses(Quiet):
    """Remembers the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def step(self, *arguments: Any) -> None:
        self.losses.append(arguments[2].loss)


def build_small(config: RunConfig, model: Callable[[], nn.Module] | None) -> Parts:
    recipe = importlib.import_module(f"samebits.recipes.{config.recipe}.recipe")
    given = (recipe.dataset_info(config),) if hasattr(recipe, "dataset_info") else ()
    parts: Parts = recipe.build(config, *given)
    if isinstance(config, PoseConfig):
        parts = with_people(parts, config)
    return parts if model is None else replace(parts, model=model())


def carry_out(
    world: World, path: Path, config: RunConfig, stop_at: int = -1, model: Callable[[], nn.Module] | None = None,
    told: Losses | None = None,
) -> Any:  # fmt: skip
    """Train until the end, or until after step `stop_at`: hash of the weights, figures, losses, whether it is done."""
    folder = RunFolder(path)
    if world.is_main:
        folder.open()
    told = told or Losses()
    job = make_job(config, lambda: build_small(config, model), world)
    try:
        checkpoints = CheckpointManager(folder, config.checkpoint, world)
        checkpoints.restore(job, "auto", told.notify)
        is_done = train_alone(job, checkpoints, told, lambda: job.progress.step == stop_at)
        checkpoints.close()
        return weights_sha256(job.state()), job.progress.metrics, told.losses, is_done
    finally:
        torch.use_deterministic_algorithms(False)
        folder.close()
