"""Inference: from an image to people, with multi-scale and flip testing.

HigherHRNet's test path (`valid.py`). Images are processed one by one, each at its own size.

    image -> make_views -> forward_views (heatmaps, tags) -> group_people -> joints in pixels of the image

Legend: P people, K joints, H and W of an image or map, T tag maps (2 with flip testing).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samebits.data.images import ByteArray, read_rgb
from samebits.recipes.backbones import normalize
from samebits.recipes.pose.config import Config
from samebits.recipes.pose.group import SCORE, Y, group_people
from samebits.recipes.pose.view import Floats, ImageView, check_shape, view

# The category id of "person" in COCO and CrowdPose.
PERSON = 1


@dataclass(frozen=True)
class Detections:
    """The people found in one image."""

    #: (P, K, 3) float64: x and y in pixels of the image, and the score of the joint; 0 if it is missing.
    joints: Floats
    scores: Floats  #: (P,) float64, the confidence of each person.
    image_id: int | str = 0  #: Number or name of the image, if known.


def read_image(path: Path) -> dict[str, Any]:
    """Read an image file as the input of `infer`.

    Returns:
        `rgb`, (3, H, W) uint8, and `image_id`, such as 785 for 000000000785.jpg.

    Raises:
        DataError: It can't be read.
    """
    rgb = read_rgb(path)
    check_shape(path, rgb.shape[1], rgb.shape[0])
    # A name can have more digits than Python converts to an int.
    digits = re.search(r"[0-9]{1,18}$", path.stem)
    return {"rgb": prepare(rgb), "image_id": int(digits.group()) if digits else path.stem}


def prepare(rgb: ByteArray) -> Tensor:
    """Convert (H, W, 3) bytes to the input of `infer`: (3, H, W) uint8."""
    return torch.from_numpy(np.ascontiguousarray(rgb.transpose(2, 0, 1)))


def make_infer(config: Config) -> Callable[[nn.Module, Any], list[Detections]]:
    """Make the inference function of these settings.

    Returns:
        (model, images) -> the detections of each image. Images are a list of (3, H, W) uint8 tensors of any sizes, or
        a dict with `rgb`, (N, 3, H, W), and N `image_id`.
    """
    test = config.test
    skeleton = config.skeleton
    mirrored = skeleton.mirrored if test.flip else None
    size_px = test.size_px or config.data.size_px

    def infer(model: nn.Module, inputs: Any) -> list[Detections]:
        is_named = isinstance(inputs, Mapping)
        images = inputs["rgb"] if is_named else inputs
        numbers = inputs["image_id"] if is_named else [0] * len(images)
        found = []
        for image, number in zip(images, numbers, strict=True):
            check_shape(f"image {number}", image.shape[-1], image.shape[-2])
            views, base = make_views(image, size_px, test.scales)
            heat, tags = forward_views(
                model, image, views, base if test.project else None, mirrored=mirrored
            )
            people, scores = group_people(heat, tags, skeleton.order, test)
            # All views show the same part of the image, so any of them converts coordinates: here the smallest.
            seen = list(views.values())[-1]
            joints = people[:, :, : SCORE + 1].astype(np.float64)
            joints[:, :, : Y + 1] = seen.to_image(
                joints[:, :, : Y + 1], heat.shape[-1], heat.shape[-2]
            )
            found.append(Detections(joints, scores.astype(np.float64), number))
        return found

    return infer


def make_views(
    image: Tensor, size_px: int, scales: Sequence[float]
) -> tuple[dict[float, ImageView], ImageView]:
    """Make the views of an image.

    Args:
        image: (3, H, W).
        size_px: Shorter side at scale 1, pixels.

    Returns:
        Views by scale, the largest first; and the view at scale 1, even if it is not among them.
    """
    height, width = image.shape[-2:]
    smallest = min(scales)
    views = {
        scale: view(width, height, size_px=size_px, scale=scale, min_scale=smallest)
        for scale in sorted(scales, reverse=True)
    }
    return views, view(width, height, size_px=size_px, scale=1.0, min_scale=smallest)


def forward_views(
    model: nn.Module,
    image: Tensor,
    views: Mapping[float, ImageView],
    project_to: ImageView | None,
    *,
    mirrored: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Run the network on all views of an image, and average.

    Args:
        model: (N, 3, H, W) -> [(N, 2 K, H / 4, W / 4) heat and tags, (N, K, H / 2, W / 2) heat].
        image: (3, H, W) uint8.
        views: Views by scale, the largest first. Tags are taken from scale 1, or from the only view.
        project_to: Resize all maps to the size of this view. None: to half the size of the largest view.
        mirrored: For each joint its partner in a mirrored image, for flip testing. None: no flip testing.

    Returns:
        (K, H, W) heat, the mean over views; (T, K, H, W) tags.
    """
    found = {
        scale: _forward_view(model, normalize(seen.sample(image)), mirrored)
        for scale, seen in views.items()
    }
    heats = [heat for heat, _ in found.values()]
    size = heats[0].shape[-2:] if project_to is None else (project_to.height, project_to.width)
    first, *others = [_resized(heat, size) for heat in heats]
    # `TestConfig` asks for scale 1 if there are several.
    _, tags = found[1] if len(found) > 1 else found.popitem()[1]
    return sum(others, first) / len(views), _resized(tags, size)


def to_prediction(found: Detections) -> dict[str, Any]:
    """Make a prediction that can be written as JSON, with people in COCO's results format."""
    return {"people": coco_results(found, found.image_id)}


def coco_results(found: Detections, image_id: int | str) -> list[dict[str, Any]]:
    """Convert detections to COCO's results format: keypoints are x, y, score of all joints."""
    results = []
    for joints, score in zip(found.joints, found.scores, strict=True):
        low = joints[:, : Y + 1].min(axis=0)
        high = joints[:, : Y + 1].max(axis=0)
        results.append(
            {
                "image_id": image_id,
                "category_id": PERSON,
                "keypoints": joints.ravel().tolist(),
                "score": float(score),
                "bbox": [*low.tolist(), *(high - low).tolist()],
            }
        )
    return results


def _forward_view(
    model: nn.Module, seen: Tensor, mirrored: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Run the network on (3, H, W): (K, h, w) heat, the mean over both outputs, and (T, K, h, w) tags, at 1/2."""
    images = torch.stack([seen, seen.flip(-1)]) if mirrored is not None else seen[None]
    coarse, fine = (output.float() for output in model(images))
    num_joints = fine.shape[1]
    coarse = F.interpolate(coarse, size=fine.shape[-2:], mode="bilinear", align_corners=False)
    heat = (coarse[:, :num_joints] + fine) / 2
    tags = coarse[:, num_joints:]
    if mirrored is None:
        return heat[0], tags
    partners = torch.tensor(mirrored, device=heat.device)
    # In the mirrored image, a left joint is found as a right one.
    back, own_tags = (maps[1].flip(-1)[partners] for maps in (heat, tags))
    return (heat[0] + back) / 2, torch.stack([tags[0], own_tags])


def _resized(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Resize (C, h, w) or (T, C, h, w)."""
    if maps.shape[-2:] == size:
        return maps
    batch = maps if maps.dim() == 4 else maps[None]
    resized = F.interpolate(batch, size=tuple(size), mode="bilinear", align_corners=False)
    return resized if maps.dim() == 4 else resized[0]
