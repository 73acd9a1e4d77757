"""The segment recipe: the parts that the engine trains, from the settings."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from samebits.engine.parts import Parts
from samebits.metrics.segmentation import SegmentationMetric
from samebits.recipes.listing import header_rows, some
from samebits.recipes.normalize import MEAN, STD
from samebits.recipes.results import draw_samples
from samebits.recipes.segment.config import Config
from samebits.recipes.segment.data import LabeledImages, read_image
from samebits.recipes.segment.drawing import TILE_PX, draw_evaluation, draw_prediction, tiles, to_prediction
from samebits.recipes.segment.listing import list_images, open_source
from samebits.recipes.segment.loss import segment_loss
from samebits.recipes.segment.model import OnlyLogits, build_model
from samebits.storage.pretrained import load_pretrained


def dataset_info(config: Config) -> Mapping[str, Any]:
    """List the classes, and the training and validation images.

    Raises:
        DataError: The images can't be found, or their masks or annotations are invalid.
    """
    return list_images(config.data, config.seed)


def build(config: Config, dataset_info: Mapping[str, Any]) -> Parts:
    """Build the parts from the settings without opening an image."""
    data, classes = config.data, list(dataset_info["classes"])
    num_without = dataset_info["num_without_mask"]
    rows = {
        "data": f"{len(classes)} classes in {data.root or data.train or 'synthetic shapes'}",
        "model": config.model.name,
        "classes": some(classes, 8),
        "no mask": f"{num_without:,} images are left out" if num_without else "",
    }
    return Parts(
        model=build_model(config.model, len(classes)),
        loss=partial(segment_loss, dice=config.loss.dice),
        train_data=partial(_open, config, dataset_info, train=True),
        eval_data=partial(_open, config, dataset_info, train=False),
        metric=partial(SegmentationMetric, classes),
        monitor=("mIoU", "max"),
        init_weights=partial(_load, path=config.model.weights) if config.model.weights else None,
        preprocess=partial(read_image, config=data),
        postprocess=partial(to_prediction, classes=classes),
        draw=partial(draw_evaluation, classes=classes),
        draw_samples=partial(draw_samples, tiles=partial(tiles, classes=classes), tile_px=(TILE_PX, TILE_PX)),
        draw_prediction=partial(draw_prediction, classes=classes),
        input_shape=(3, *data.size_px),
        metadata={
            "classes": classes,
            "mean": MEAN,
            "std": STD,
            "preprocess": {"colors": "RGB", "resize_px": data.size_px},
        },
        describe=header_rows(rows, dataset_info),
    )


def _open(config: Config, dataset_info: Mapping[str, Any], *, train: bool) -> LabeledImages:
    return LabeledImages(open_source(config.data, dataset_info, train=train), config.data, train=train)


def _load(model: nn.Module, path: Path) -> Mapping[str, str]:
    # The files of torchvision have the names of the network without the wrapper.
    return load_pretrained(model.net if isinstance(model, OnlyLogits) else model, path.expanduser())
