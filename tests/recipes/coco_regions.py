"""A dataset of images and masks as a COCO annotation file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

from samebits.recipes.segment.make import CLASSES


def write_coco(root: Path) -> Path:
    """Write coco.json into a folder that `samebits data make segment` has written."""
    images: list[dict[str, Any]] = []
    regions: list[dict[str, Any]] = []
    for index, path in enumerate(sorted((root / "masks").iterdir())):
        labels = np.asarray(Image.open(path))
        size = {"width": labels.shape[1], "height": labels.shape[0]}
        images.append({"id": index, "file_name": f"images/{path.stem}.jpg", **size})
        for label in np.unique(labels[labels > 0]).tolist():
            # COCO's encoder takes columns first.
            region = coco_mask.encode(np.asfortranarray((labels == label).astype(np.uint8)))
            counts = {"size": region["size"], "counts": region["counts"].decode()}
            entry = {"id": len(regions) + 1, "image_id": index, "category_id": label, "iscrowd": 0}
            regions.append({**entry, "segmentation": counts})
    categories = [{"id": label, "name": name} for label, name in enumerate(CLASSES) if label]
    content = {"images": images, "annotations": regions, "categories": categories}
    (root / "coco.json").write_text(json.dumps(content), encoding="utf-8")
    return root / "coco.json"
