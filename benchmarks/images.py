"""Images per second from files to normalized batches on one core: Samebits against common loaders.

    python benchmarks/images.py --data flower_photos
    python benchmarks/images.py --data flower_photos --rounds 21 --batch 32

All take a random crop of the image at 224 px, flip it at random, normalize it and make batches:

- ImageFolder: torchvision's ImageFolder, Pillow and transforms, as in the tutorials
- v2 on tensors: torchvision's decode_image and transforms.v2, resize on bytes, normalized per image
- Samebits, from JPEG files
- Samebits, from decoded images (data.cache), filled before
- Samebits, without scaled decoding (large images)

They take turns of a few batches on one core, so that a slower machine slows all. Prints the median over the rounds, and
the median of the rounds' ratios. Large images are made from small ones: 12 of them enlarged in a grid, 4000x3000, with
the noise of a sensor. Quality: PSNR of Samebits's bytes against the exact antialiased resize of the same crop in
float64, from the completely decoded image; three crops of each large image.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from samebits.data.crop import RandomBoxes, fitting_scale
from samebits.data.images import read_rgb
from samebits.data.keyed import keys
from samebits.errors import DataError
from samebits.recipes.classify.config import DataConfig
from samebits.recipes.classify.data import ImageFiles, open_files
from samebits.recipes.classify.folders import list_folder

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def image_folder(folder: Path, batch: int) -> Callable[[list[int]], None]:
    transform = torchvision.transforms.Compose(
        [
            torchvision.transforms.RandomResizedCrop(224),
            torchvision.transforms.RandomHorizontalFlip(),
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize(MEAN, STD),
        ]
    )
    return _batches(torchvision.datasets.ImageFolder(str(folder), transform), batch)


def v2_tensors(folder: Path, batch: int) -> Callable[[list[int]], None]:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )

    def load(path: str) -> Tensor:
        return decode_image(path, ImageReadMode.RGB)

    return _batches(torchvision.datasets.ImageFolder(str(folder), transform, loader=load), batch)


def _batches(dataset: torchvision.datasets.ImageFolder, batch: int) -> Callable[[list[int]], None]:
    def run(indices: list[int]) -> None:
        for start in range(0, len(indices), batch):
            torch.utils.data.default_collate([dataset[index] for index in indices[start : start + batch]])

    return run


def samebits(folder: Path, batch: int, **settings: object) -> Callable[[list[int]], None]:
    files = samples(folder, **settings)
    epoch = iter(range(10**9))

    def run(indices: list[int]) -> None:
        number = next(epoch)
        for start in range(0, len(indices), batch):
            chosen = np.array(indices[start : start + batch])
            files.finish(files.batch(chosen, keys(0, number, chosen)))

    return run


def samples(folder: Path, **settings: object) -> ImageFiles:
    config = DataConfig(root=folder, **settings)
    listed = list_folder(folder, "data.root")
    return open_files(folder, listed, list(listed), config, train=True)


def measure(ways: dict[str, Callable[[list[int]], None]], indices: list[int], rounds: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run(indices)
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - start) / len(indices))
    first = next(iter(ways))
    for name, taken in times.items():
        ratio = statistics.median(base / own for base, own in zip(times[first], taken, strict=True))
        middle = statistics.median(taken)
        print(f"  {name:34} {1 / middle:8.0f} images/s {middle * 1e3:8.2f} ms  {ratio:5.2f} times", flush=True)


def exact_resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize in float64, bilinear with antialiasing: each output pixel is a triangle-weighted mean."""

    def weights(size: int, target: int) -> np.ndarray:
        factor = size / target
        support = max(1.0, factor)
        centres = (np.arange(target) + 0.5) * factor
        distance = np.abs(np.arange(size)[None, :] + 0.5 - centres[:, None]) / support
        triangle = np.clip(1 - distance, 0, None)
        return triangle / triangle.sum(1, keepdims=True)

    rows = weights(pixels.shape[0], height)
    columns = weights(pixels.shape[1], width)
    return np.einsum("yh,hwc,xw->yxc", rows, pixels.astype(np.float64), columns, optimize=True)


def quality(folder: Path, indices: list[int], num_parts: int = 1) -> None:
    """Compute the PSNR of the training transform by scale of decoding, over random crops of each image."""
    files = samples(folder, flip=0.0)
    found: dict[int, list[float]] = {}
    for epoch, index in itertools.product(range(num_parts), indices):
        chosen = np.array([index])
        own = keys(0, epoch, chosen)
        ours = files.batch(chosen, own).inputs[0].numpy()
        pixels = read_rgb(files.files[index])
        box = RandomBoxes(own, area=(0.08, 1.0), ratio=(0.75, 1.3333), first_column=1).box(0, pixels.shape[1::-1])
        scale = fitting_scale(min(box.width, box.height), 224, margin=1.0)
        at = box.at(scale)
        top, left, height, width = (value * scale for value in (at.top, at.left, at.height, at.width))
        exact = exact_resize(pixels[top : top + height, left : left + width], 224, 224)
        error = float(np.mean((exact - ours) ** 2))
        found.setdefault(scale, []).append(10 * math.log10(255**2 / error))
    for scale in sorted(found):
        values = found[scale]
        low, middle = min(values), statistics.median(values)
        print(f"  decoded at 1/{scale}: PSNR median {middle:.1f} dB, minimum {low:.1f} dB, {len(values)} crops")


def make_large(folder: Path, out: Path, *, noise: float, jpeg_quality: int, count: int = 8) -> int:
    """Write 12-megapixel JPEG files, and return their mean size in bytes."""
    random = np.random.default_rng(0)
    paths = sorted(folder.glob("*/*.jpg"))
    (out / "a").mkdir(parents=True)
    (out / "b").mkdir()
    sizes = []
    for number in range(count):
        canvas = Image.new("RGB", (4000, 3000))
        for place in range(12):
            tile = Image.open(paths[int(random.integers(len(paths)))]).convert("RGB")
            canvas.paste(tile.resize((1000, 1000), Image.Resampling.BICUBIC), (place % 4 * 1000, place // 4 * 1000))
        values = np.asarray(canvas).astype(np.float32) + random.normal(0, noise, (3000, 4000, 1)).astype(np.float32)
        path = out / "ab"[number % 2] / f"{number}.jpg"
        Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(path, quality=jpeg_quality)
        sizes.append(path.stat().st_size)
    return int(statistics.mean(sizes))


def spread(total: int, count: int) -> list[int]:
    return [place * total // count for place in range(count)]


def large(folder: Path, arguments: argparse.Namespace) -> Iterator[None]:
    for noise, jpeg_quality in ((2.0, 85), (3.0, 90)):
        with tempfile.TemporaryDirectory() as place:
            size = make_large(folder, Path(place) / "large", noise=noise, jpeg_quality=jpeg_quality)
            root = Path(place) / "large"
            print(f"12 megapixels, {size / 1e6:.1f} MB each (JPEG quality {jpeg_quality}, noise {noise:g})")
            ways = {
                "ImageFolder, Pillow, transforms": image_folder(root, 4),
                "v2 on tensors": v2_tensors(root, 4),
                "Samebits": samebits(root, 4),
                "Samebits, scaled_decode=false": samebits(root, 4, scaled_decode=False),
            }
            measure(ways, spread(8, 8), max(3, arguments.rounds // 2))
            quality(root, spread(8, 8), num_parts=3)
        yield


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="class folders of JPEG images")
    parser.add_argument(
        "--rounds", type=count, default=11, help="rounds; in each, all readers take turns (%(default)s)"
    )
    parser.add_argument("--batch", type=count, default=16, help="images per batch (%(default)s)")
    parser.add_argument("--pictures", type=count, default=128, help="images per round (%(default)s)")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow {Image.__version__}, one core")
    try:
        total = sum(map(len, list_folder(arguments.data, "--data").values()))
    except DataError as error:
        sys.exit(str(error))
    indices = spread(total, arguments.pictures)
    with tempfile.TemporaryDirectory() as place:
        cached = samebits(arguments.data, arguments.batch, cache=Path(place))
        cached(indices)
        print(f"{arguments.data.name}, {len(indices)} images, batches of {arguments.batch}")
        ways = {
            "ImageFolder, Pillow, transforms": image_folder(arguments.data, arguments.batch),
            "v2 on tensors": v2_tensors(arguments.data, arguments.batch),
            "Samebits, JPEG files": samebits(arguments.data, arguments.batch),
            "Samebits, decoded pictures": cached,
        }
        measure(ways, indices, arguments.rounds)
        quality(arguments.data, indices)
    for _ in large(arguments.data, arguments):
        pass


if __name__ == "__main__":
    main()
