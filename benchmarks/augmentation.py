"""Images per second with augmentation on one core: Samebits against torchvision's v2 pipeline.

    make bench-augmentation DATA=flower_photos
    python benchmarks/augmentation.py --data flower_photos --rounds 21 --batch 32

Both decode a JPEG file, take a random crop at 224 px, flip it, apply the same transforms of torchvision.transforms.v2,
normalize it and make batches. The v2 pipeline is that of torchvision's reference training on tensors: decode_image,
resize on bytes, MixUp and CutMix on the batch. Both take turns of a few batches in one process of one thread. Prints
the median of CPU time per image, which hardly depends on other programs, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode, v2

from samebits.data.keyed import keys, seed_reading
from samebits.recipes.classify.augment_config import AugmentConfig
from samebits.recipes.classify.config import DataConfig
from samebits.recipes.classify.data import open_files
from samebits.recipes.classify.folders import list_folder

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BILINEAR = InterpolationMode.BILINEAR

# Name -> our settings, transforms of v2 on bytes, on the normalized image, and on the batch.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any], list[Any]]] = {
    "crop and flip": ({}, [], [], []),
    "RandAugment": ({"policy": "randaugment"}, [v2.RandAugment(interpolation=BILINEAR)], [], []),
    "TrivialAugmentWide": ({"policy": "trivialaugment_wide"}, [v2.TrivialAugmentWide(interpolation=BILINEAR)], [], []),
    "color jitter": (
        {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
        [v2.ColorJitter(0.4, 0.4, 0.4, 0.1)],
        [],
        [],
    ),
    "random erasing": ({"erasing": 0.25, "erasing_fill": "noise"}, [], [v2.RandomErasing(0.25, value="random")], []),
    "MixUp or CutMix": ({"mixup": 0.2, "cutmix": 1.0}, [], [], ["mixup", "cutmix"]),
    "recipe V2": (
        {"policy": "trivialaugment_wide", "erasing": 0.1, "mixup": 0.2, "cutmix": 1.0},
        [v2.TrivialAugmentWide(interpolation=BILINEAR)],
        [v2.RandomErasing(0.1)],
        ["mixup", "cutmix"],
    ),
}


def torchvisions(
    folder: Path, batch: int, on_bytes: list[Any], on_values: list[Any], on_batch: list[Any]
) -> Callable[[list[int]], None]:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            *on_bytes,
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
            *on_values,
        ]
    )
    dataset = torchvision.datasets.ImageFolder(
        str(folder), transform, loader=lambda path: decode_image(path, ImageReadMode.RGB)
    )
    num_classes = len(dataset.classes)
    kinds = {"mixup": v2.MixUp(alpha=0.2, num_classes=num_classes), "cutmix": v2.CutMix(num_classes=num_classes)}
    mix = v2.RandomChoice([kinds[name] for name in on_batch]) if on_batch else None

    def run(indices: list[int]) -> None:
        for start in range(0, len(indices), batch):
            samples = [dataset[index] for index in indices[start : start + batch]]
            images, targets = torch.utils.data.default_collate(samples)
            if mix is not None:
                mix(images, targets)

    return run


def samebits(folder: Path, batch: int, settings: dict[str, Any]) -> Callable[[list[int]], None]:
    listed = list_folder(folder, "data.root")
    config, augment = DataConfig(root=folder), AugmentConfig(**settings)
    files = open_files(folder, listed, list(listed), config, train=True, augment=augment)
    epoch = iter(range(10**9))

    def run(indices: list[int]) -> None:
        number = next(epoch)
        for start in range(0, len(indices), batch):
            chosen = np.array(indices[start : start + batch])
            own = keys(0, number, chosen)
            seed_reading(own)
            read = files.batch(chosen, own)
            seed_reading(own)  # as in Loader.batch
            files.finish(read)

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="folder with a folder of images for each class")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=64, help="images of a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_files = len(list(arguments.data.glob("*/*.jpg")))
    indices = [place * num_files // arguments.images for place in range(arguments.images)]
    print(f"images/s of CPU time, medians of {arguments.rounds} rounds        v2   Samebits   ratio")
    for name, (settings, *transforms) in CASES.items():
        ways = [
            torchvisions(arguments.data, arguments.batch, *transforms),
            samebits(arguments.data, arguments.batch, settings),
        ]
        taken: list[list[float]] = [[], []]
        for number in range(arguments.rounds + 1):
            for way, times in zip(ways, taken, strict=True):
                start = time.process_time()
                way(indices)
                if number:  # the first round warms up
                    times.append((time.process_time() - start) / len(indices))
        ratio = statistics.median(theirs / ours for theirs, ours in zip(*taken, strict=True))
        theirs, ours = (1 / statistics.median(times) for times in taken)
        print(f"{name:38} {theirs:12.0f} {ours:10.0f}   {ratio:5.2f}", flush=True)


if __name__ == "__main__":
    main()
