"""Synthetic people as files in COCO's layout, with regions, crowds and people without keypoints, as COCO has them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

from samebits.data.keyed import key
from samebits.recipes.pose.config import SPLITS, MakeConfig
from samebits.recipes.pose.skeletons import COCO
from samebits.recipes.pose.synthetic import EVAL, Drawing, describe, draw_synthetic_image

JPEG_QUALITY = 92
FAR_EVERY = 4  # in every fourth image the last person has no keypoints, and in every eighth it is a crowd


def make(config: MakeConfig, out: Path) -> str:
    """Write the dataset into an empty folder.

    Returns:
        A summary for the user, with the command that trains on it.
    """
    for split, name in enumerate(SPLITS["coco"]):
        folder = out / "images" / name
        folder.mkdir(parents=True)
        count = (config.num_train, config.num_eval)[split]
        images, people = [], []
        for index in range(count):
            picture_id = 1 + index + split * 1_000_000
            drawing = draw_synthetic_image(config.size_px, key(config.seed, EVAL, split, index))
            truth = describe(drawing, picture_id)
            Image.fromarray(drawing.rgb).save(folder / truth["file_name"], quality=JPEG_QUALITY)
            images.append({"id": picture_id, **{name: truth[name] for name in ("file_name", "width", "height")}})
            people.extend(_annotations(drawing, truth["annotations"], index))
        category = {
            "id": 1,
            "name": "person",
            "supercategory": "person",
            "keypoints": list(COCO.joints),
            "skeleton": [[first + 1, second + 1] for first, second in COCO.limbs],
        }
        content = {"images": images, "annotations": people, "categories": [category]}
        path = out / "annotations" / f"person_keypoints_{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    train = f"samebits train pose data.name=coco data.root={shlex.quote(str(out))}"
    return f"{config.num_train:,} + {config.num_eval:,} images in COCO's layout; train with   {train}"


def _annotations(drawing: Drawing, people: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """Add regions to the annotations; in some images, remove the keypoints of the last person."""
    for person, entry in enumerate(people):
        region = coco_mask.encode(np.asfortranarray((drawing.owners == person + 1).astype(np.uint8)))
        entry["segmentation"] = {"size": region["size"], "counts": region["counts"].decode()}
    if index % FAR_EVERY == FAR_EVERY - 1 and len(people) > 1:
        people[-1] |= {"keypoints": [0.0] * 3 * COCO.num_joints, "num_keypoints": 0}
        if index % (2 * FAR_EVERY) == FAR_EVERY - 1:
            people[-1] |= {"iscrowd": 1, "segmentation": _runs(drawing, len(people))}
    return people


def _runs(drawing: Drawing, owner: int) -> dict[str, Any]:
    """Encode a region as uncompressed run lengths, as COCO does for crowds."""
    inside = (drawing.owners == owner).T.reshape(-1)
    changes = np.flatnonzero(np.diff(inside, prepend=False))
    counts = np.diff(np.concatenate([[0], changes, [inside.size]]))
    return {"size": list(drawing.owners.shape), "counts": counts.tolist()}
