"""Image files as samples.

Legend: N images, H and W their height and width, S the side of the square that the model sees.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.data.crop import Box, RandomBoxes, centre_square, fitting_scale, resize_into, resized_shorter
from lockstep.data.decoded import DecodedPictures
from lockstep.data.images import ByteArray, Picture
from lockstep.data.keyed import IntArray, KeyArray, uniform
from lockstep.data.names import first_outside, outside
from lockstep.data.samples import Batch
from lockstep.errors import DataError
from lockstep.recipes.classify.config import DataConfig
from lockstep.recipes.classify.listing import IMAGES_CURE, Files, folder_of

# Of a sample's random numbers, the first says whether it is mirrored; the part that is taken uses those after it.
_FLIP, _CROP = 0, 1
# Pixels that are to be left for each of the result's, along a side, for an image to be read smaller than it is.
_TRAIN_MARGIN, _EVAL_MARGIN = 1.0, 2.0
_CURES = "put a whole image in its place,\nor begin anew with data.on_error=skip: such images are left out"


@dataclass(frozen=True)
class Head:
    """What an image file says of itself before it is decoded."""

    size: tuple[int, int]
    is_scalable: bool


class ImageFiles:
    """Images in files with their labels: a random part of each to train on, or the middle to evaluate on.

    Batches come as bytes, (N, S, S, 3); `finish` makes numbers of them on the device.

    Args:
        files: N paths.
        labels: (N,) int64, their classes.
        config: What is done to them.
        train: Whether to take random parts.
        decoded: Where decoded images are kept, if anywhere.
    """

    is_costly = True

    def __init__(
        self,
        files: Sequence[Path],
        labels: Tensor,
        config: DataConfig,
        *,
        train: bool,
        decoded: DecodedPictures | None = None,
    ) -> None:
        self.files, self._labels, self._config, self._train = files, labels, config, train
        self._decoded = decoded
        self._heads: dict[int, Head] = {}
        self._normalise = Normalise(config)

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read, cut and resize: inputs (N, S, S, 3) bytes, targets (N,) int64.

        Raises:
            DataError: An image cannot be read.
        """
        size_px = self._config.size_px
        images = torch.empty(len(indices), size_px, size_px, 3, dtype=torch.uint8)
        try:
            if self._train:
                self._read_random_parts(images, indices, keys)
            else:
                for place, index in enumerate(indices.tolist()):
                    images[place] = self._middle(index)
        except DataError as error:
            if self._config.on_error == "stop":
                raise DataError(error.what, **{**error.slots, "fix": _CURES}) from error
            raise
        places = torch.from_numpy(indices)
        return Batch(images, self._labels.index_select(0, places), places)

    def finish(self, batch: Batch) -> Batch:
        """On the device: inputs become (N, 3, S, S) float32, normalised, with the channels last in memory."""
        return dataclasses.replace(batch, inputs=self._normalise(batch.inputs))

    def _read_random_parts(self, images: Tensor, indices: IntArray, keys: KeyArray) -> None:
        boxes = RandomBoxes(keys, area=self._config.crop_area, ratio=self._config.crop_ratio, first_column=_CROP)
        flips = (uniform(keys, _FLIP) < self._config.flip).tolist()
        for place, index in enumerate(indices.tolist()):
            pixels, box = self._random_part(index, boxes, place)
            resize_into(images[place], pixels, box, mirrored=flips[place])

    def _random_part(self, index: int, boxes: RandomBoxes, place: int) -> tuple[ByteArray, Box]:
        head, picture = self._look(index)
        box = boxes.box(place, head.size)
        scale = self._scale(head, min(box.width, box.height), self._config.size_px, _TRAIN_MARGIN)
        box = box.at(scale)
        return self._pixels(index, picture, scale, bottom_px=box.top + box.height), box

    def _middle(self, index: int) -> Tensor:
        head, picture = self._look(index)
        scale = self._scale(head, min(head.size), resize_px(self._config), _EVAL_MARGIN)
        return crop_centre(self._pixels(index, picture, scale), self._config)

    def _look(self, index: int) -> tuple[Head, Picture | None]:
        """An image's head; the file is opened, unless this process has seen it and its pixels may be kept."""
        head = self._heads.get(index)
        if head is not None:
            return head, None
        picture = Picture(self.files[index])
        head = Head(picture.size, picture.is_scalable)
        if self._decoded is not None:
            self._heads[index] = head
        return head, picture

    def _scale(self, head: Head, shorter_px: int, target_px: int, margin: float) -> int:
        if not (head.is_scalable and self._config.scaled_decode):
            return 1
        return fitting_scale(shorter_px, target_px, margin=margin)

    def _pixels(self, index: int, picture: Picture | None, scale: int, *, bottom_px: int | None = None) -> ByteArray:
        path = self.files[index]
        if self._decoded is None:
            return (picture or Picture(path)).pixels(scale, bottom_px=bottom_px)
        whole = self._heads[index].size
        size = (-(-whole[0] // scale), -(-whole[1] // scale))
        pixels = self._decoded.read(path, scale, size)
        if pixels is None:
            pixels = (picture or Picture(path)).pixels(scale)
            if pixels.shape[1::-1] != size:
                raise DataError(
                    f"the image {path} has another size than when this run first read it",
                    given=f"{pixels.shape[1]}x{pixels.shape[0]}",
                    allowed=f"{size[0]}x{size[1]}",
                    fix="put the image back, and change no data while a run reads it",
                )
            self._decoded.keep(path, scale, pixels)
        return pixels


class Normalise:
    """Bytes to numbers: (byte / 255 - mean) / std for each of red, green and blue."""

    def __init__(self, config: DataConfig) -> None:
        # Rows of the whole image, three colours in turn: with only three values to repeat, torch would go through the
        # image three values at a time, which takes eight times as long.
        mean, std = (
            torch.tensor(values, dtype=torch.float64).repeat(config.size_px) for values in (config.mean, config.std)
        )
        self._factor, self._offset = (1 / (255 * std)).float(), (-mean / std).float()

    def __call__(self, images: Tensor) -> Tensor:
        """(N, S, S, 3) bytes -> (N, 3, S, S) float32, channels last in memory."""
        if self._factor.device != images.device:
            self._factor, self._offset = self._factor.to(images.device), self._offset.to(images.device)
        rows = images.flatten(2)
        if images.device.type != "cpu":
            values = torch.addcmul(self._offset, rows.float(), self._factor)
        else:
            # numpy's memory: it asks for large pages, which torch does not, and a batch needs thousands of small ones.
            values = torch.from_numpy(np.empty(rows.shape, dtype=np.float32))
            # Image by image: one stays in the cache for both passes, a batch does not.
            for taken, made in zip(rows, values, strict=True):
                torch.addcmul(self._offset, made.copy_(taken), self._factor, out=made)
        return values.view(images.shape).permute(0, 3, 1, 2)


def resize_px(config: DataConfig) -> int:
    """The shorter side's length from which evaluation cuts the middle."""
    return config.eval_resize_px or round(config.size_px * 256 / 224)


def crop_centre(pixels: ByteArray, config: DataConfig) -> Tensor:
    """What evaluation sees of a whole image, (H, W, 3) bytes: (S, S, 3) bytes."""
    return centre_square(resized_shorter(pixels, resize_px(config), config.size_px), config.size_px)


def preprocess(path: Path, config: DataConfig) -> Tensor:
    """An image file of the user as evaluation sees it: (3, S, S) float32.

    Raises:
        DataError: The file is no image, or damaged.
    """
    picture = Picture(path)
    scale = 1
    if picture.is_scalable and config.scaled_decode:
        scale = fitting_scale(min(picture.size), resize_px(config), margin=_EVAL_MARGIN)
    return Normalise(config)(crop_centre(picture.pixels(scale), config).unsqueeze(0))[0]


def open_files(base: Path, files: Files, classes: Sequence[str], config: DataConfig, *, train: bool) -> ImageFiles:
    """Samples over files that were listed; none of them is opened yet.

    Args:
        base: What their paths are relative to.
        files: By class.
        classes: In the model's order.
        config: What is done to them.
        train: Whether to train on them.

    Raises:
        DataError: One that was listed when the run started is not there.
    """
    base = folder_of(base, config.images)
    name = first_outside((file for found in files.values() for file in found), base, base)
    if name is not None:
        raise outside(name, base, where=None, fix=IMAGES_CURE)
    paths = [base / file for name in classes for file in files.get(name, [])]
    missing = next((path for path in paths if not os.path.exists(path)), None)
    if missing is not None:
        is_link = missing.is_symlink()
        raise DataError(
            f"the image {missing} is not there",
            link=f"it leads to {os.readlink(missing)}" if is_link else None,
            cause=None if is_link else "it was there when the run started, or the data lies elsewhere now",
            fix="put it back, or give the place where the images are: data.root=DIR",
        )
    labels = torch.tensor([label for label, name in enumerate(classes) for _ in files.get(name, [])], dtype=torch.int64)
    decoded = None if config.cache is None else DecodedPictures(config.cache, int(config.cache_gb * 1e9))
    return ImageFiles(paths, labels, config, train=train, decoded=decoded)
