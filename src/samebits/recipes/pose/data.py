"""Datasets of images of people, for training and evaluation.

Legend: N images, H and W height and width of an image, P people, K joints, S the side of the training square.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from samebits.data.images import ByteArray
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch
from samebits.recipes.backbones import MEAN, STD
from samebits.recipes.pose.config import DataConfig
from samebits.recipes.pose.view import Floats, Placement, draw_placement

# Training targets: heatmaps with a peak at each joint, and the indices of each person's joints.
#
# Both as in the HigherHRNet authors' implementation. Points are truncated towards zero: x = -0.4 is on pixel 0, x = -1
# is
# outside.
#
# Legend: P people, K joints, R height and width of a map.


Maps = npt.NDArray[np.float32]


def joints_on_map(joints: Floats, size_px: int) -> tuple[IntArray, IntArray, IntArray]:
    """Select the joints that are visible and on the map.

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible (if above 0).

    Returns:
        For each of M joints, sorted by person: (M,) the person, (M,) the joint, and (M, 2) the pixel (x, y).
    """
    num_joints = joints.shape[1]
    flat = joints.reshape(-1, joints.shape[2])
    x = flat[:, 0]
    y = flat[:, 1]
    # Compared before the truncation: a number far outside would not fit into an integer.
    (on_map,) = ((flat[:, 2] > 0) & (x > -1) & (y > -1) & (x < size_px) & (y < size_px)).nonzero()
    people, kinds = np.divmod(on_map, num_joints)
    return people, kinds, flat.take(on_map, axis=0)[:, :2].astype(np.int64)


def draw_heatmaps(joints: Floats, sigma: float, size_px: int, out: Maps | None = None) -> Maps:
    """Draw a Gaussian peak of height 1 for each joint; where peaks overlap, the larger value.

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible.
        sigma: Standard deviation of the peaks, in pixels of the map.
        out: (K, R, R) zeros to draw on. None: allocate.

    Returns:
        (K, R, R).
    """
    maps = np.zeros((joints.shape[1], size_px, size_px), np.float32) if out is None else out
    patch = _patch(sigma)
    _, kinds, pixels = joints_on_map(joints, size_px)
    # Rounded as in the reference: if 3 * sigma is not whole, a patch is slightly off center and may be cut.
    firsts = np.round(pixels - (3 * sigma + 1)).astype(np.int64).tolist()
    lasts = np.minimum(np.round(pixels + (3 * sigma + 2)).astype(np.int64), size_px).tolist()
    for kind, (left, top), (right, bottom) in zip(kinds, firsts, lasts, strict=True):
        area = maps[kind, max(top, 0) : bottom, max(left, 0) : right]
        part = patch[max(-top, 0) : bottom - top, max(-left, 0) : right - left]
        np.maximum(area, part, out=area)
    return maps


def index_joints(joints: Floats, size_px: int, max_people: int) -> IntArray:
    """Compute the indices of each person's joints into the flattened tag maps.

    If there are more than `max_people`, those with the most joints on the map are kept, in their order. The others
    have no tag loss in this image, but keep their peaks. (The reference raises an IndexError.)

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible.

    Returns:
        (max_people, K, 2): index (joint * R^2 + y * R + x, or y * R + x with one map for all joints) and 1, for the
        joints on the map; the rest is zero.
    """
    index = np.zeros((max_people, joints.shape[1], 2), np.int64)
    people, kinds, pixels = joints_on_map(joints, size_px)
    if len(joints) > max_people:
        counts = np.bincount(people, minlength=len(joints))
        chosen = np.sort(np.argsort(-counts, kind="stable")[:max_people])
        stays = np.isin(people, chosen)
        people = np.searchsorted(chosen, people[stays])
        kinds = kinds[stays]
        pixels = pixels[stays]
    flat = (kinds * size_px + pixels[:, 1]) * size_px + pixels[:, 0]
    places = np.arange(len(people)) - people.searchsorted(people)
    index[people, places, 0] = flat
    index[people, places, 1] = 1
    return index


@lru_cache(maxsize=256)
def _patch(sigma: float) -> Maps:
    """Compute a Gaussian of height 1 on a square of pixels: (N, N), with N = 6 * sigma + 3."""
    offsets = np.arange(0, 6 * sigma + 3) - (3 * sigma + 1)
    squares = offsets**2
    return np.exp(-(squares[:, None] + squares[None, :]) / (2 * sigma**2)).astype(np.float32)


STRIDES = (4, 2)  # of the two outputs of the network
HALF = 127
_MEAN, _STD = (np.array(values, dtype=np.float32) * np.float32(255) for values in (MEAN, STD))


@dataclass(frozen=True)
class Example:
    """An image and the people in it."""

    rgb: ByteArray  #: (H, W, 3).
    joints: Floats  #: (P, K, 3): x, y in pixels, visible.
    mask: ByteArray | None = (
        None  #: (H, W), 255 where the loss counts, 0 elsewhere. None: it counts everywhere.
    )


class Source(Protocol):
    """A source of images with annotated people."""

    def __len__(self) -> int:
        """Return the number of images."""

    def example(self, index: int, key: int) -> Example:
        """Load an image; the key is the only source of random numbers, if there are any."""

    def ground_truth(self, index: int) -> dict[str, Any]:
        """Return image_id, file_name, width, height, crowd_index, and annotations in COCO's format."""


@dataclass(frozen=True)
class Sample:
    """The input and the targets of one training image; of maps and masks the one at 1/4 first."""

    image: Maps  #: (S, S, 3) float32, normalized.
    heatmaps: Sequence[Maps]  #: (K, S/4, S/4) and (K, S/2, S/2).
    masks: Sequence[Maps]  #: (S/4, S/4) and (S/2, S/2) float32, 1 where the loss counts.
    index: IntArray  #: (max_people, K, 2); `index_joints` describes it.


class _Images:
    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    @property
    def files(self) -> Sequence[str] | None:
        """Paths of the files that are read, where the source has any."""
        return getattr(self.source, "files", None)


class TrainImages(_Images):
    """Training images with random rotation, scale, shift and flip, and their targets."""

    def __init__(self, source: Source, config: DataConfig, *, channels_last: bool = True) -> None:
        super().__init__(source)
        self._config = config
        self._channels_last = channels_last

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Load, transform and draw a batch.

        Returns:
            inputs (N, 3, S, S) float32; targets: `heatmaps` [(N, K, S/4, S/4), (N, K, S/2, S/2)], `masks`
            [(N, S/4, S/4), (N, S/2, S/2)] float32, `index` (N, max_people, K, 2) int64.
        """
        count = len(indices)
        size = self._config.size_px
        num_joints = self._config.skeleton.num_joints
        images = np.empty((count, size, size, 3), np.float32)
        heatmaps = [
            np.zeros((count, num_joints, size // step, size // step), np.float32)
            for step in STRIDES
        ]
        masks = [np.empty((count, size // step, size // step), np.float32) for step in STRIDES]
        index = np.empty((count, self._config.max_people, num_joints, 2), np.int64)
        for row, (sample_index, key) in enumerate(
            zip(indices.tolist(), keys.tolist(), strict=True)
        ):
            example = self.source.example(sample_index, key)
            height, width = example.rgb.shape[:2]
            place_sample(
                example,
                draw_placement(width, height, key, self._config),
                self._config,
                Sample(
                    images[row],
                    [maps[row] for maps in heatmaps],
                    [mask[row] for mask in masks],
                    index[row],
                ),
            )
        inputs = torch.from_numpy(images).permute(0, 3, 1, 2)
        targets = {
            "heatmaps": [torch.from_numpy(maps) for maps in heatmaps],
            "masks": [torch.from_numpy(mask) for mask in masks],
            "index": torch.from_numpy(index),
        }
        return Batch(
            inputs if self._channels_last else inputs.contiguous(),
            targets,
            torch.from_numpy(indices),
        )


def place_sample(example: Example, placement: Placement, config: DataConfig, out: Sample) -> None:
    """Transform an image and its annotations into the training square.

    Args:
        out: Written by this function. Its heatmaps must be zero.
    """
    size = config.size_px
    warped = placement.warp(example.rgb, size)
    # As rows of S * 3 numbers: numpy is slow with a last dimension of 3.
    np.subtract(warped.reshape(size, -1), np.tile(_MEAN, size), out=out.image.reshape(size, -1))
    np.divide(out.image.reshape(size, -1), np.tile(_STD, size), out=out.image.reshape(size, -1))

    mask = np.full(example.rgb.shape[:2], 255, np.uint8) if example.mask is None else example.mask
    for stage, stride in enumerate(STRIDES):
        map_px = size // stride
        # Interpolated values up to a half, and pixels outside of the image, count as masked.
        np.greater(placement.warp(mask, map_px), HALF, out=out.masks[stage], casting="unsafe")
        joints = placement.joints(example.joints, map_px, config.skeleton)
        draw_heatmaps(joints, config.sigma, map_px, out=out.heatmaps[stage])
        if stage == 0:
            out.index[...] = index_joints(joints, map_px, config.max_people)


class EvalImages(_Images):
    """Validation images at their own sizes, with their annotations."""

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Load a batch.

        Returns:
            inputs: N tensors (3, H, W) uint8; targets: N dicts of `Source.ground_truth`.
        """
        images = [torch.from_numpy(self.rgb(index)).permute(2, 0, 1) for index in indices.tolist()]
        return Batch(
            images,
            [self.source.ground_truth(index) for index in indices.tolist()],
            torch.from_numpy(indices),
        )

    def rgb(self, index: int) -> ByteArray:
        """Return (H, W, 3) bytes of an image."""
        rgb = self.source.example(index, 0).rgb
        # torch warns about arrays that are not writable.
        return rgb if rgb.flags.writeable else rgb.copy()
