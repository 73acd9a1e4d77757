"""The classify recipe: the parts that the engine trains, from the settings."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from samebits.engine.parts import Parts
from samebits.metrics.classification import Accuracy
from samebits.recipes.classify.config import Config
from samebits.recipes.classify.data import ImageFiles, preprocess, resize_px
from samebits.recipes.classify.drawing import draw_evaluation, draw_prediction, tiles
from samebits.recipes.classify.folders import Files, order_row
from samebits.recipes.classify.listing import list_images, list_validation
from samebits.recipes.classify.loss import cross_entropy
from samebits.recipes.classify.model import build_model, frozen_row
from samebits.recipes.classify.published import find_published, load_published
from samebits.recipes.listing import header_rows, whole_path
from samebits.recipes.results import draw_samples, top_classes
from samebits.storage.pretrained import load_pretrained

NUM_TOP = 5


def dataset_info(config: Config) -> Mapping[str, Any]:
    """List the classes, the training and validation images, and the damaged images left out.

    Raises:
        DataError: The images can't be found, the splits do not match, or pretrained weights cannot be downloaded.
    """
    found = list_images(config.data, config.seed)
    published = {"weights": find_published(config.model.name)} if config.model.weights == "pretrained" else {}
    # Chosen once, as the validation images are (ADR 11).
    sets = {
        name: [whole_path(path), list_validation(path, config.data, found["classes"])[0]]
        for name, path in config.data.eval_sets.items()
    }
    return {**published, "classes": found.pop("classes"), **({"eval_sets": sets} if sets else {}), **found}


def build(config: Config, dataset_info: Mapping[str, Any]) -> Parts:
    """Build the parts from the settings without opening an image. Raises ConfigError if there is no such network."""
    classes: list[str] = dataset_info["classes"]
    model = build_model(config.model, len(classes))
    rows = {
        "data": f"{len(classes):,} classes in {config.data.root or config.data.train}",
        "classes": order_row(classes) if config.data.classes is None else "",
        "model": config.model.name,
        "frozen": frozen_row(model, weights=config.model.weights),
    }
    weights = config.model.weights
    init_weights: Callable[[nn.Module], Mapping[str, str]] | None = None
    if weights == "pretrained":
        info = dataset_info["weights"]
        init_weights = partial(load_published, name=config.model.name, info=info, data=config.data)
    elif weights is not None:
        init_weights = partial(load_pretrained, path=Path(weights))
    return Parts(
        model=model,
        loss=partial(cross_entropy, label_smoothing=config.loss.label_smoothing),
        train_data=partial(_open, config, dataset_info, train=True),
        eval_data=partial(_open, config, dataset_info, train=False),
        eval_sets={name: partial(_open_set, config, dataset_info, name) for name in config.data.eval_sets},
        metric=partial(Accuracy, len(classes), num_top=NUM_TOP, classes=classes),
        monitor=("top1", "max"),
        init_weights=init_weights,
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
        describe=header_rows(rows, dataset_info),
    )


def _open(config: Config, dataset_info: Mapping[str, Any], *, train: bool) -> ImageFiles:
    data, classes = config.data, dataset_info["classes"]
    path = data.root or data.train if train else data.eval or data.root
    assert path is not None
    files: Files = dataset_info["train" if train else "held_out"]
    if not train and data.eval is not None and whole_path(data.eval) != dataset_info["held_out_from"]:
        # The user evaluates on images other than the validation split of the run.
        files = list_validation(path, data, classes)[0]
    return ImageFiles(path, files, classes, data, train=train, augment=config.augment)


def _open_set(config: Config, dataset_info: Mapping[str, Any], name: str) -> ImageFiles:
    """Open a set of data.eval_sets: the images that the run lists, or those of a set that was named later."""
    path, classes = config.data.eval_sets[name], dataset_info["classes"]
    listed_from, files = dataset_info.get("eval_sets", {}).get(name, (None, {}))
    if listed_from != whole_path(path):
        files = list_validation(path, config.data, classes)[0]
    return ImageFiles(path, files, classes, config.data, train=False)
