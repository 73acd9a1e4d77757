"""Folders of images for the tests of classify."""

from pathlib import Path
from typing import Any

from samebits.recipes.classify.config import Config, DataConfig, MakeConfig
from samebits.recipes.classify.data import ImageFiles
from samebits.recipes.classify.make import make
from samebits.recipes.classify.recipe import dataset_info
from samebits.recipes.classify.rows import list_folder


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def shapes(root: Path, num_per_class: int = 4, size_px: int = 40) -> Path:
    """Synthetic images in five class folders."""
    make(MakeConfig(num_per_class=num_per_class, size_px=size_px), root)
    return root


def found(**data: Any) -> dict[str, Any]:
    """The listing of settings; damaged images are left out."""
    return dict(dataset_info(Config.model_validate({"recipe": "classify", "data": {"on_error": "skip", **data}})))


def opened(root: Path, *, train: bool = True, augment: Any = None, **settings: Any) -> ImageFiles:
    """All images of class folders."""
    files = list_folder(root, "data.root")
    config = DataConfig(**{"root": root, "size_px": 32, **settings})
    return ImageFiles(root, files, list(files), config, train=train, augment=augment)
