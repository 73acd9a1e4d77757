"""The classify recipe: the parts that the engine trains, from the settings."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from samebits.data.images import read_rgb
from samebits.data.keyed import IntArray
from samebits.data.samples import Batch, Samples
from samebits.engine.parts import Parts
from samebits.errors import printable
from samebits.metrics.classification import Accuracy
from samebits.recipes.backbones import frozen_row, initial_weights, published_info
from samebits.recipes.classify.config import Config
from samebits.recipes.classify.data import ImageFiles, preprocess, resize_px
from samebits.recipes.classify.listing import list_images, list_validation
from samebits.recipes.classify.model import build_model
from samebits.recipes.classify.rows import Files, order_row
from samebits.recipes.listing import is_another_set, listing_rows, whole_path
from samebits.recipes.results import (
    ByteArray,
    draw_classes,
    draw_samples,
    draw_shares,
    top_classes,
)
from samebits.storage.run_folder import write_atomically

# The training loss: cross-entropy.


def cross_entropy(logits: Tensor, batch: Batch, *, label_smoothing: float) -> Mapping[str, Tensor]:
    """Compute the mean cross-entropy in nats.

    Label smoothing as in Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016,
    section 7: the target is (1 - smoothing) for the label and smoothing / C more for each of the C classes.

    Args:
        logits: (N, C) scores of the classes.
        batch: Its targets are (N,) labels, from 0 to C - 1.
        label_smoothing: Share of the target that is spread over all classes, from 0 to 1.

    Returns:
        The loss by name, a scalar.
    """
    return {
        "cross_entropy": F.cross_entropy(
            logits.float(), batch.targets, label_smoothing=label_smoothing
        )
    }


# Draw an evaluation and a prediction.


def tiles(batch: Batch, classes: Sequence[str]) -> Iterable[tuple[ByteArray, str]]:
    """Return the images of a batch, (S, S, 3) bytes, each with its class."""
    return zip(
        batch.inputs.numpy(), (classes[label] for label in batch.targets.tolist()), strict=True
    )


def draw_evaluation(
    metric: Accuracy, samples: Samples, folder: Path, *, classes: Sequence[str]
) -> None:
    """Draw the confusion matrix and the images with the largest loss, and write the counts to confusion.csv.

    With too many classes for a matrix, the file has the samples of each class and how many were correct.
    """
    state = metric.state()
    folder.mkdir(parents=True, exist_ok=True)
    if "confusion" in state:
        matrix = np.array(state["confusion"], np.int64)
        table = np.column_stack([matrix.sum(1), matrix.diagonal(), matrix])
        columns = [f"predicted {name}" for name in classes]
    else:
        table = np.column_stack([state["samples"], state["correct"]])
        columns = []
    _write_counts(table, columns, classes, folder / "confusion.csv")
    draw_classes(
        metric, samples, folder, classes=classes, tiles=lambda batch: tiles(batch, classes)
    )


def _write_counts(
    table: IntArray, columns: Sequence[str], classes: Sequence[str], path: Path
) -> None:
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["ground truth", "samples", "correct", *map(_cell, columns)])
    rows.writerows([_cell(name), *row] for name, row in zip(classes, table.tolist(), strict=True))
    write_atomically(path, text.getvalue().encode())


def _cell(name: str) -> str:
    """Return a class name that no terminal and no spreadsheet acts on: there, a cell after = + - @ is a formula."""
    name = printable(name)
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t")) else name


def draw_prediction(path: Path, prediction: Mapping[str, Any]) -> Image.Image:
    """Draw an image with the most likely classes of `top_classes` below it, each with a bar for its probability."""
    image = Image.fromarray(read_rgb(path))
    image.thumbnail((720, 720))
    colors = [_FIRST, *[_OTHERS] * len(prediction["top"])]
    rows = [(each["class"], each["probability"]) for each in prediction["top"]]
    return draw_shares(image, [(*row, color) for row, color in zip(rows, colors, strict=False)])


NUM_TOP = 5
_FIRST = (33, 102, 172)
_OTHERS = (150, 150, 150)


def dataset_info(config: Config) -> Mapping[str, Any]:
    """List the classes, the training and validation images, and the damaged images left out.

    Raises:
        DataError: The images can't be found, the splits do not match, or pretrained weights cannot be downloaded.
    """
    found = list_images(config.data, config.seed)
    # Chosen once, as the validation images are (ADR 11).
    sets = {
        name: [whole_path(path), list_validation(path, config.data, found["classes"])[0]]
        for name, path in config.data.eval_sets.items()
    }
    return {
        **published_info(config.model.name, config.model.weights),
        "classes": found.pop("classes"),
        **({"eval_sets": sets} if sets else {}),
        **found,
    }


def build(config: Config, dataset_info: Mapping[str, Any]) -> Parts:
    """Build the parts from the settings without opening an image. Raises ConfigError if there is no such network."""
    classes: list[str] = dataset_info["classes"]
    model = build_model(config.model, len(classes))
    return Parts(
        model=model,
        loss=partial(cross_entropy, label_smoothing=config.loss.label_smoothing),
        train_data=partial(_open, config, dataset_info, train=True),
        eval_data=partial(_open, config, dataset_info, train=False),
        eval_sets={
            name: partial(_open_set, config, dataset_info, name) for name in config.data.eval_sets
        },
        metric=partial(Accuracy, len(classes), num_top=NUM_TOP, classes=classes),
        monitor=("top1", "max"),
        init_weights=initial_weights(
            config.model.weights,
            config.model.name,
            dataset_info,
            mean=config.data.mean,
            std=config.data.std,
        ),
        preprocess=partial(preprocess, config=config.data),
        postprocess=partial(top_classes, classes=classes, num_top=NUM_TOP),
        draw=partial(draw_evaluation, classes=classes),
        draw_samples=partial(draw_samples, tiles=partial(tiles, classes=classes)),
        draw_prediction=draw_prediction,
        input_shape=(3, config.data.size_px, config.data.size_px),
        metadata={
            "classes": classes,
            "mean": config.data.mean,
            "std": config.data.std,
            "preprocess": {
                "colors": "RGB",
                "resize_shorter_px": resize_px(config.data),
                "crop_px": config.data.size_px,
            },
        },
        describe={
            "data": f"{len(classes):,} classes in {config.data.path(train=True)}",
            "classes": order_row(classes) if config.data.classes is None else "",
            "model": config.model.name,
            "frozen": frozen_row(model, weights=config.model.weights),
            **listing_rows(dataset_info),
        },
    )


def _open(config: Config, dataset_info: Mapping[str, Any], *, train: bool) -> ImageFiles:
    data = config.data
    classes = dataset_info["classes"]
    path = data.path(train=train)
    assert path is not None
    files: Files = dataset_info["train" if train else "held_out"]
    if not train and is_another_set(data, dataset_info):
        files = list_validation(path, data, classes)[0]
    return ImageFiles(path, files, classes, data, train=train, augment=config.augment)


def _open_set(config: Config, dataset_info: Mapping[str, Any], name: str) -> ImageFiles:
    """Open a set of data.eval_sets: the images that the run lists, or those of a set that was named later."""
    path = config.data.eval_sets[name]
    classes = dataset_info["classes"]
    listed_from, files = dataset_info.get("eval_sets", {}).get(name, (None, {}))
    if listed_from != whole_path(path):
        files = list_validation(path, config.data, classes)[0]
    return ImageFiles(path, files, classes, config.data, train=False)
