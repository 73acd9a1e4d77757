"""Samples from image files.

Legend: N images, H and W their height and width, S the side of the model's square input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from samebits.data.crop import (
    Box,
    RandomBoxes,
    center_square,
    fitting_scale,
    resized,
    resized_shorter,
)
from samebits.data.images import ByteArray, EncodedImage
from samebits.data.keyed import IntArray, KeyArray, key, uniform
from samebits.data.samples import Batch, Samples
from samebits.errors import DataError
from samebits.recipes.classify.config import AugmentConfig, DataConfig
from samebits.recipes.classify.listing import open_set
from samebits.recipes.classify.rows import Files

# Augmentation by torchvision.transforms.v2, with keyed random numbers.
#
# torchvision draws from torch's default CPU generator. It is seeded for each sample before operations on its bytes, and
# by the micro-batch's first key before operations on a whole micro-batch (`Loader.batch`). The results are therefore
# pure functions of (seed, epoch, sample), or of the micro-batch.
#
#     bytes of a sample, in a worker     crop, flip -> RandAugment or TrivialAugmentWide -> color jitter
#     micro-batch, on the device         normalize -> random erasing -> MixUp or CutMix
#
# This is the order of torchvision's reference training.
#
# Legend: N images, S their side in pixels, C classes.


_AUGMENT = 1  # distinguishes this use of a sample's key from its crop and flip


class Augmentation:
    """The random operations of the settings; `num_classes` is C, for mixed targets."""

    def __init__(self, config: AugmentConfig, num_classes: int) -> None:
        #: Operations on the bytes of a sample.
        self._image: list[Any] = []
        if config.policy == "randaugment":
            self._image.append(
                v2.RandAugment(
                    config.num_ops, config.magnitude, interpolation=InterpolationMode.BILINEAR
                )
            )
        elif config.policy == "trivialaugment_wide":
            self._image.append(v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR))
        jitter = (config.brightness, config.contrast, config.saturation, config.hue)
        if any(jitter):
            self._image.append(v2.ColorJitter(*jitter))
        self._erase: Any = None
        if config.erasing:
            # the mean is 0 after normalization
            value: Any = 0 if config.erasing_fill == "mean" else "random"
            self._erase = v2.RandomErasing(config.erasing, value=value, inplace=True)
        mixing: list[Any] = []
        if config.mixup and config.mix_probability:
            mixing.append(v2.MixUp(alpha=config.mixup, num_classes=num_classes))
        if config.cutmix and config.mix_probability:
            mixing.append(v2.CutMix(alpha=config.cutmix, num_classes=num_classes))
        self._mix: Any = v2.RandomChoice(mixing) if mixing else None
        self._mix_probability = config.mix_probability
        self._num_classes = num_classes

    def augment(self, images: Tensor, keys: list[int]) -> None:
        """Apply the operations on bytes to each of (N, S, S, 3) images, in place, by the N keys of the samples."""
        if not self._image:
            return
        for image, sample_key in zip(images.permute(0, 3, 1, 2), keys, strict=True):
            # The only generator that torchvision draws from here. torch.manual_seed would also seed those of the GPUs.
            torch.default_generator.manual_seed(key(sample_key, _AUGMENT))
            changed = image
            for operation in self._image:
                changed = operation(changed)
            # Into the batch, of which `image` is a view: most operations return new memory.
            image.copy_(changed)

    def augment_batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the operations on a normalized micro-batch, with torch's default CPU generator.

        Args:
            inputs: (N, 3, S, S) float32; may be changed.
            targets: (N,) int64 classes.

        Returns:
            The inputs, and the targets: (N, C) probabilities if MixUp or CutMix is on, otherwise as given.
        """
        if self._erase is not None:
            # One by one: for a whole batch, RandomErasing would erase the same rectangle in all images.
            for image in inputs:
                self._erase(image)
        if self._mix is None:
            return inputs, targets
        if torch.rand(()) < self._mix_probability:
            mixed: tuple[Tensor, Tensor] = self._mix(inputs, targets)
            return mixed
        # As probabilities, the form that a mixed micro-batch has.
        return inputs, torch.nn.functional.one_hot(targets, self._num_classes).float()


# Columns of a sample's random numbers: the first decides on the flip, the others on the crop.
_FLIP = 0
_CROP = 1
# Decoded pixels per pixel of the result, along a side, that a scaled decode must leave.
_TRAIN_MARGIN = 1.0
_EVAL_MARGIN = 2.0
_FIX = "Replace the image by a readable one,\nor start a new run with data.on_error=skip to leave such images out."


class ImageFiles(Samples):
    """Images with labels: random crops for training, center crops for evaluation.

    Batches are bytes, (N, S, S, 3). `finish` converts them to float32 on the device.

    The images are listed before, and are not opened here.

    Args:
        path: Class folders, a CSV file, or files with rows.
        augment: Augmentation of training images after the crop. None: none.

    Raises:
        DataError: A file that was listed at the start of the run is missing.
    """

    is_costly = True

    def __init__(
        self,
        path: Path,
        files: Files,
        classes: Sequence[str],
        config: DataConfig,
        *,
        train: bool,
        augment: AugmentConfig | None = None,
    ) -> None:
        self._images = open_set(path, config)
        self._config = config
        self._train = train
        self._names = [file for name in classes for file in files.get(name, [])]
        labels = [label for label, name in enumerate(classes) for _ in files.get(name, [])]
        self._labels = torch.tensor(labels, dtype=torch.int64)
        self.files: Sequence[Path] = self._images.files(self._names)
        self._augmentation = Augmentation(
            augment if train and augment is not None else AugmentConfig(), len(classes)
        )
        self._size_px = (config.train_px or config.size_px) if train else config.size_px
        self._normalize = Normalize(config, self._size_px)

    def __len__(self) -> int:
        return len(self._names)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Decode, crop and resize a batch: inputs (N, S, S, 3) bytes, targets (N,) int64.

        Raises:
            DataError: An image cannot be read.
        """
        images = torch.empty(len(indices), self._size_px, self._size_px, 3, dtype=torch.uint8)
        try:
            if self._train:
                config = self._config
                boxes = RandomBoxes(
                    keys, area=config.crop_area, ratio=config.crop_ratio, first_column=_CROP
                )
                flips = (uniform(keys, _FLIP) < config.flip).tolist()
                for row, index in enumerate(indices.tolist()):
                    pixels, box = self._random_crop(index, boxes, row)
                    images[row] = resized(
                        pixels, box, self._size_px, self._size_px, mirrored=flips[row]
                    )
                self._augmentation.augment(images, keys.tolist())
            else:
                for row, index in enumerate(indices.tolist()):
                    images[row] = center_crop(
                        self._images.encoded(self._names[index]), self._config
                    )
        except DataError as error:
            if self._config.on_error == "stop":
                raise error.with_slots(fix=_FIX) from error
            raise
        index_tensor = torch.from_numpy(indices)
        return Batch(images, self._labels.index_select(0, index_tensor), index_tensor)

    def finish(self, batch: Batch) -> Batch:
        """Normalize on the device, and mix or erase: (N, 3, S, S) float32 in channels-last memory format."""
        inputs, targets = self._augmentation.augment_batch(
            self._normalize(batch.inputs), batch.targets
        )
        return dataclasses.replace(batch, inputs=inputs, targets=targets)

    def _random_crop(self, index: int, boxes: RandomBoxes, row: int) -> tuple[ByteArray, Box]:
        encoded = self._images.encoded(self._names[index])
        box = boxes.box(row, encoded.size)
        shorter_px = min(box.width, box.height)
        scale = _scale(encoded, self._config, shorter_px, self._size_px, _TRAIN_MARGIN)
        return encoded.pixels(scale), box.at(scale)


class Normalize:
    """Normalization of bytes: (byte / 255 - mean) / std for each of red, green and blue."""

    def __init__(self, config: DataConfig, size_px: int) -> None:
        # Repeated to a whole row of pixels: broadcasting three values, torch would process the image three values at
        # a time, which takes eight times as long.
        mean, std = (
            torch.tensor(values, dtype=torch.float64).repeat(size_px)
            for values in (config.mean, config.std)
        )
        self._factor = (1 / (255 * std)).float()
        self._offset = (-mean / std).float()

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize (N, S, S, 3) bytes to (N, 3, S, S) float32 in channels-last memory format."""
        factor = self._factor.to(images.device)
        offset = self._offset.to(images.device)
        values = torch.addcmul(offset, images.flatten(2).float(), factor)
        return values.view(images.shape).permute(0, 3, 1, 2)


def resize_px(config: DataConfig) -> int:
    """Return the shorter side before the center crop in evaluation, in pixels."""
    return config.eval_resize_px or round(config.size_px * 256 / 224)


def center_crop(encoded: EncodedImage, config: DataConfig) -> Tensor:
    """Decode, resize and center-crop an image to (S, S, 3) bytes, as evaluation does."""
    shorter_px = resize_px(config)
    scale = _scale(encoded, config, min(encoded.size), shorter_px, _EVAL_MARGIN)
    image = resized_shorter(encoded.pixels(scale), shorter_px, config.size_px)
    return center_square(image, config.size_px)


def _scale(
    encoded: EncodedImage, config: DataConfig, shorter_px: int, target_px: int, margin: float
) -> int:
    """Return the scale at which to decode an image, of which a box with this shorter side is resized to the target."""
    if not (encoded.is_scalable and config.scaled_decode):
        return 1
    return fitting_scale(shorter_px, target_px, margin=margin)


def preprocess(path: Path, config: DataConfig) -> Tensor:
    """Read an image file as evaluation does: (3, S, S) float32, normalized.

    Raises:
        DataError: The file is not an image, or is damaged.
    """
    image = center_crop(EncodedImage(path), config)
    return Normalize(config, config.size_px)(image.unsqueeze(0))[0]
