"""Cases of the reference's test path: known people, painted as the output of a perfect network."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from samebits.recipes.pose.config import Config
from samebits.recipes.pose.infer import Detections, make_infer, prepare
from samebits.recipes.pose.skeletons import COCO, SKELETONS


def config_of(settings: dict[str, Any]) -> Config:
    return Config.model_validate({"recipe": "pose", **settings})


def paint_quickly(
    people: Any, matrix: Any, width: int, height: int, divisor: int, flip: Any = None, *, tag_step: float
) -> tuple[Any, Any]:
    """Paint what paint.py paints, to the bit, touching only the pixels where float32 is not 0."""
    shape = (people.shape[1], height // divisor, width // divisor)
    heat, tags = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for person, joints in enumerate(people):
        for joint, (x, y, flag) in enumerate(joints):
            if flag <= 0:
                continue
            x, y = (matrix @ (x, y, 1.0)) / divisor
            channel = joint
            if flip is not None:
                x, channel = shape[2] - 1 - x, flip[joint]
            rows, columns = (slice(max(0, int(at) - 31), max(0, int(at) + 32)) for at in (y, x))
            yy, xx = np.arange(shape[1])[rows, None], np.arange(shape[2])[columns]
            value = (np.exp(-((xx - x) ** 2 + (yy - y) ** 2) / 8.0) * (0.9 - 0.01 * joint)).astype(np.float32)
            heat[channel, rows, columns] = np.maximum(heat[channel, rows, columns], value)
            tags[channel, rows, columns][value > 0.05] = tag_step * (person + 1)
    return heat, tags


class Painted(nn.Module):
    """Returns the output of a perfect network, for an input of any size."""

    def __init__(self, facts: Mapping[str, Any], people: Any, scales: Any) -> None:
        super().__init__()
        self.facts, self.people = facts, people
        self.matrices = {(int(row[1]), int(row[2])): row[7:].reshape(2, 3) for row in scales}

    def forward(self, images: Tensor) -> list[Tensor]:
        height, width = images.shape[-2:]
        coarse, fine = [], []
        for is_mirrored in range(len(images)):
            flip = self.facts["flip_index"] if is_mirrored else None
            step = self.facts["tag_step_mirrored" if is_mirrored else "tag_step"]
            asked = (self.people, self.matrices[width, height], width, height)
            coarse.append(np.concatenate(paint_quickly(*asked, 4, flip, tag_step=step)))
            fine.append(paint_quickly(*asked, 2, flip, tag_step=step)[0])
        return [torch.from_numpy(np.stack(maps)) for maps in (coarse, fine)]


class Valid:
    """One case of the reference's pose_valid: images, known people, and what the reference finds."""

    def __init__(self, parity_folder: Path, pose_folder: Path, name: str) -> None:
        self.facts = json.loads((parity_folder / "pose_valid.json").read_text())[name]
        with np.load(parity_folder / "pose_valid.npz", allow_pickle=False) as arrays:
            self.arrays = {key.split("/", 1)[1]: arrays[key] for key in arrays.files if key.startswith(name + "/")}
        self.skeleton = SKELETONS[name.split("_")[0]]
        self.images = pose_folder / ("coco/images/val2017" if self.skeleton is COCO else "crowdpose/images")
        self.annotations = json.loads((pose_folder / self.facts["annotation_file"]).read_text())

    @property
    def numbers(self) -> range:
        return range(sum(key.endswith("/image_id") and "results" not in key for key in self.arrays))

    def rgb(self, number: int) -> Any:
        image_id = int(self.arrays[f"{number}/image_id"])
        name = next(image["file_name"] for image in self.annotations["images"] if image["id"] == image_id)
        return np.asarray(Image.open(self.images / name).convert("RGB"))

    def model(self, number: int) -> Painted:
        return Painted(self.facts, self.arrays[f"{number}/people"], self.arrays[f"{number}/scales"])

    def target(self, number: int) -> dict[str, Any]:
        image_id = int(self.arrays[f"{number}/image_id"])
        image = next(image for image in self.annotations["images"] if image["id"] == image_id)
        people = [each for each in self.annotations["annotations"] if each["image_id"] == image_id]
        return {"image_id": image_id, "crowd_index": image.get("crowdIndex"), "annotations": people}

    def config(self) -> Config:
        return config_of(
            {
                "data": {"name": self.skeleton.name, "size_px": 512},
                "test": {"scales": self.facts["scale_factor"], "project": self.facts["project2image"], "flip": True},
            }
        )

    @cache  # noqa: B019  # one object, as long as the tests
    def found(self) -> list[Detections]:
        infer = make_infer(self.config())
        return [infer(self.model(number), prepare(self.rgb(number))[None])[0] for number in self.numbers]
