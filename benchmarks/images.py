"""Images per second from files to normalized batches on one core: Samebits against common loaders.

    python -m benchmarks.images --data flower_photos
    python -m benchmarks.images --data flower_photos --rounds 21 --batch 32

All take a random crop of the image at 224 px, flip it at random, normalize it and make batches:

- ImageFolder: torchvision's ImageFolder, Pillow and transforms, as in the tutorials
- v2 on tensors: torchvision's decode_image and transforms.v2, resize on bytes, normalized per image
- Samebits, from JPEG files
- Samebits, from decoded images (data.cache), filled before

"Decoder alone" reads and decodes whole images, and does nothing else: the limit of a reader that decodes all of an
image. Samebits decodes what it needs of the crop. The second table has the whole loaders, with worker processes.

They take turns of a few batches, the first table's on one core, so that a slower machine slows all. Prints the median
over the rounds, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks.small_networks import rest_text
from samebits.cores import describe_other_load
from samebits.data.images import decode_plain_jpeg
from samebits.data.keyed import keys
from samebits.data.loader import Loader
from samebits.errors import DataError
from samebits.recipes.classify.config import DataConfig
from samebits.recipes.classify.data import ImageFiles
from samebits.recipes.classify.rows import list_folder

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


def v2_images(folder: Path) -> torchvision.datasets.ImageFolder:
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

    return torchvision.datasets.ImageFolder(str(folder), transform, loader=load)


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


def decoder(folder: Path) -> Callable[[list[int]], None]:
    files = [folder / path for paths in list_folder(folder, "data.root").values() for path in paths]

    def run(indices: list[int]) -> None:
        for index in indices:
            decode_plain_jpeg(files[index].read_bytes())

    return run


def data_loader(folder: Path, batch: int, workers: int) -> Callable[[list[int]], None]:
    dataset = v2_images(folder)

    def run(indices: list[int]) -> None:
        for _ in torch.utils.data.DataLoader(dataset, batch, sampler=indices, num_workers=workers):
            pass

    return run


def loader(folder: Path, batch: int, workers: int, **settings: object) -> Callable[[list[int]], None]:
    files = samples(folder, **settings)

    def run(indices: list[int]) -> None:
        chosen = [np.array(indices[start : start + batch]) for start in range(0, len(indices), batch)]
        requests = [(each, keys(0, 0, each)) for each in chosen]
        stream = Loader(files, lambda: iter(requests), torch.device("cpu"), num_workers=workers)
        for request in requests:
            stream.batch(*request)
        stream.close()

    return run


def samples(folder: Path, **settings: object) -> ImageFiles:
    config = DataConfig(root=folder, **settings)
    listed = list_folder(folder, "data.root")
    return ImageFiles(folder, listed, list(listed), config, train=True)


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


def spread(total: int, count: int) -> list[int]:
    return [place * total // count for place in range(count)]


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
    parser.add_argument("--workers", type=count, default=2, help="of the whole loaders (%(default)s)")
    arguments = parser.parse_args()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
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
            "v2 on tensors": _batches(v2_images(arguments.data), arguments.batch),
            "decoder alone": decoder(arguments.data),
            "Samebits, JPEG files": samebits(arguments.data, arguments.batch),
            "Samebits, decoded pictures": cached,
        }
        measure(ways, indices, arguments.rounds)
        os.sched_setaffinity(0, cores)
        print(f"whole loaders, {arguments.workers} workers on {len(cores)} cores, {rest_text(describe_other_load())}")
        given = arguments.data, arguments.batch, arguments.workers
        ways = {
            "DataLoader, v2 on tensors": data_loader(*given),
            "Samebits, JPEG files": loader(*given),
            "Samebits, decoded pictures": loader(*given, cache=Path(place)),
        }
        measure(ways, indices, arguments.rounds)


if __name__ == "__main__":
    main()
