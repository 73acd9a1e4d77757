"""The mnist recipe: the parts that the engine trains, from the settings."""

from collections.abc import Iterable
from functools import partial

from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.metrics.classification import Accuracy
from samebits.recipes.mnist.config import Config
from samebits.recipes.mnist.data import SCALES, TITLES, Scale, open_images
from samebits.recipes.mnist.loss import cross_entropy
from samebits.recipes.mnist.model import NUM_CLASSES, build_model
from samebits.recipes.mnist.predict import read_image
from samebits.recipes.results import ByteArray, draw_classes, draw_samples, gray_tiles, top_classes

CLASSES = [str(digit) for digit in range(NUM_CLASSES)]


def build(config: Config) -> Parts:
    """Build the parts from the settings. Reads no data yet.

    Raises:
        ConfigError: The network cannot take images of this size.
    """
    scale = SCALES[config.data.name]
    return Parts(
        model=build_model(config),
        loss=cross_entropy,
        train_data=partial(open_images, config.data, train=True),
        eval_data=partial(open_images, config.data, train=False),
        metric=partial(Accuracy, NUM_CLASSES),
        monitor=("top1", "max"),
        preprocess=partial(read_image, scale=scale),
        postprocess=partial(top_classes, classes=range(NUM_CLASSES), num_top=3),
        draw=partial(draw_classes, classes=CLASSES, tiles=partial(_tiles, scale=scale)),
        draw_samples=partial(draw_samples, tiles=partial(_tiles, scale=scale)),
        input_shape=(1, scale.size_px, scale.size_px),
        metadata={
            "classes": CLASSES,
            "mean": scale.mean,
            "std": scale.std,
            "preprocess": {"colors": "gray, light on dark", "resize_px": [scale.size_px, scale.size_px]},
        },
        describe={"data": TITLES[config.data.name], "model": config.model.name},
    )


def _tiles(batch: Batch, scale: Scale) -> Iterable[tuple[ByteArray, str]]:
    return zip(gray_tiles(batch, scale.mean, scale.std), map(str, batch.targets.tolist()), strict=True)
