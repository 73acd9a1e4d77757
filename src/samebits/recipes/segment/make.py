"""Make a synthetic dataset: images/ and masks/, and the same masks as a COCO annotation file."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

from samebits.data.keyed import key
from samebits.recipes.segment.config import MakeConfig
from samebits.recipes.segment.synthetic import CLASSES, draw_image


def make(config: MakeConfig, out: Path) -> str:
    """Write the dataset into an empty folder. Returns a summary for the user, with the command that trains on it."""
    (out / "images").mkdir(parents=True)
    (out / "masks").mkdir()
    images: list[dict[str, Any]] = []
    regions: list[dict[str, Any]] = []
    for index in range(config.num_images):
        pixels, labels = draw_image(config.size_px, key(config.seed, 3, index))
        name = f"{index:04}"
        Image.fromarray(pixels).save(out / "images" / f"{name}.jpg", quality=92)
        Image.fromarray(labels).save(out / "masks" / f"{name}.png")
        images.append(
            {"id": index, "file_name": f"images/{name}.jpg", "width": config.size_px, "height": config.size_px}
        )
        for label in np.unique(labels[labels > 0]).tolist():
            # COCO's encoder takes columns first.
            region = coco_mask.encode(np.asfortranarray((labels == label).astype(np.uint8)))
            regions.append(
                {
                    "id": len(regions) + 1,
                    "image_id": index,
                    "category_id": label,
                    "iscrowd": 0,
                    "segmentation": {"size": region["size"], "counts": region["counts"].decode()},
                }
            )
    categories = [{"id": label, "name": name} for label, name in enumerate(CLASSES) if label]
    content = {"images": images, "annotations": regions, "categories": categories}
    (out / "coco.json").write_text(json.dumps(content), encoding="utf-8")
    command = shlex.join(["samebits", "train", "segment", f"data.root={out}", "data.size_px=96"])
    return f"{config.num_images:,} images of shapes with masks; train with   {command}"
