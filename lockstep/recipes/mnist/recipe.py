"""The mnist recipe: from settings to what the engine trains."""

from __future__ import annotations

from functools import partial

from lockstep.engine.parts import Parts
from lockstep.metrics.classification import Accuracy
from lockstep.recipes.mnist.config import Config
from lockstep.recipes.mnist.data import SCALES, TITLES, open_pictures
from lockstep.recipes.mnist.drawing import draw_pictures, draw_samples
from lockstep.recipes.mnist.loss import cross_entropy
from lockstep.recipes.mnist.model import NUM_CLASSES, build_model
from lockstep.recipes.mnist.picture import answer, read_picture


def build(config: Config) -> Parts:
    """Join data, model, loss and metric. Reads no data yet.

    Raises:
        ConfigError: The settings ask for a network that can't take these pictures.
    """
    scale = SCALES[config.data.name]
    return Parts(
        model=build_model(config),
        loss=cross_entropy,
        train_data=partial(open_pictures, config.data, train=True),
        eval_data=partial(open_pictures, config.data, train=False),
        metric=partial(Accuracy, NUM_CLASSES),
        monitor=("top1", "max"),
        preprocess=partial(read_picture, scale=scale),
        postprocess=answer,
        draw=partial(draw_pictures, scale=scale),
        draw_samples=partial(draw_samples, scale=scale),
        input_shape=(1, scale.size_px, scale.size_px),
        metadata={"classes": [str(digit) for digit in range(NUM_CLASSES)], "mean": scale.mean, "std": scale.std},
        describe={"data": TITLES[config.data.name], "model": config.model.name},
    )
