"""Augmentation by torchvision.transforms.v2, with keyed random numbers.

torchvision draws from torch's default CPU generator. It is seeded for each sample before operations on its bytes, and
by the micro-batch's first key before operations on a whole micro-batch (`Loader.batch`). The results are therefore
pure functions of (seed, epoch, sample), or of the micro-batch.

    bytes of a sample, in a worker     crop, flip -> RandAugment or TrivialAugmentWide -> color jitter
    micro-batch, on the device         normalize -> random erasing -> MixUp or CutMix

This is the order of torchvision's reference training.

Legend: N images, S their side in pixels, C classes.
"""

from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from samebits.data.keyed import key
from samebits.recipes.classify.config import AugmentConfig

_AUGMENT = 1  # distinguishes this use of a sample's key from its crop and flip


class Augmentation:
    """The random operations of the settings; `num_classes` is C, for mixed targets."""

    def __init__(self, config: AugmentConfig, num_classes: int) -> None:
        #: Operations on the bytes of a sample.
        self._image: list[Any] = []
        if config.policy == "randaugment":
            self._image.append(
                v2.RandAugment(config.num_ops, config.magnitude, interpolation=InterpolationMode.BILINEAR)
            )
        elif config.policy == "trivialaugment_wide":
            self._image.append(v2.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR))
        jitter = (config.brightness, config.contrast, config.saturation, config.hue)
        if any(jitter):
            self._image.append(v2.ColorJitter(*jitter))
        self._erase: Any = None
        if config.erasing:
            value: Any = 0 if config.erasing_fill == "mean" else "random"  # the mean is 0 after normalization
            self._erase = v2.RandomErasing(config.erasing, value=value, inplace=True)
        mixing: list[Any] = []
        if config.mixup and config.mix_probability:
            mixing.append(v2.MixUp(alpha=config.mixup, num_classes=num_classes))
        if config.cutmix and config.mix_probability:
            mixing.append(v2.CutMix(alpha=config.cutmix, num_classes=num_classes))
        self._mix: Any = v2.RandomChoice(mixing) if mixing else None
        self._mix_probability, self._num_classes = config.mix_probability, num_classes

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
