"""Readers of images with annotations: COCO's files, archives of images, masks."""

import shutil
from pathlib import Path


def coco(path: Path) -> None:
    from samebits.data.coco import draw_regions
    from samebits.recipes.pose.coco_files import is_hidden, read_annotations
    from samebits.recipes.pose.skeletons import SKELETONS

    found = read_annotations(path, SKELETONS["coco"])
    for number, image in found.imgs.items():
        if image["width"] * image["height"] < 1 << 24:  # a larger one would have to be the picture's size
            draw_regions(found, filter(is_hidden, found.imgToAnns.get(number, [])), number)


def masks(path: Path) -> None:
    """A dataset of two images, whose masks are the file."""
    root = path.parent / "dataset"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("a", "b"):
        for folder, file in (("images", path.parent / "image.jpg"), ("masks", path)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, root / folder / f"{name}{file.suffix}")
    _read_labels(root)


def regions(path: Path) -> None:
    """A COCO file whose regions become classes of pixels."""
    _read_labels(path)


def _read_labels(root: Path) -> None:
    import numpy as np

    from samebits.data.keyed import keys
    from samebits.recipes.segment.config import DataConfig
    from samebits.recipes.segment.data import LabeledImages
    from samebits.recipes.segment.listing import list_images, open_source

    config = DataConfig(root=root, size_px=(32, 32))
    info = list_images(config, 0)
    for train in (True, False):
        samples = LabeledImages(open_source(config, info, train=train), config, train=train)
        indices = np.arange(len(samples))
        samples.batch(indices, keys(0, 0, indices))
