"""Small datasets of every kind of source, whose samples are (index + random number, index)."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch.utils.data import Dataset

from samebits.data.sources.parquet_rows import ParquetRows
from samebits.data.sources.tar_shards import TarShards

if TYPE_CHECKING:
    import datasets  # takes a second

Item = tuple[float, int]


def noise(item: Item) -> Item:
    """Add random numbers of all three generators to the first value."""
    return item[0] + random.random() + float(np.random.random()) + float(torch.rand(())), item[1]


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar archive with Python's own module."""
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def split(num_samples: int, num_files: int) -> list[range]:
    """Split samples over files: some may be empty if there are more files than samples."""
    bounds = [num_samples * number // num_files for number in range(num_files + 1)]
    return [range(first, last) for first, last in pairwise(bounds) if last > first]


class Plain(Dataset[Item]):
    """A map-style dataset of torch."""

    def __init__(self, folder: Path, num_samples: int, num_files: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Item:
        return noise((float(index), index))


def tar(folder: Path, num_samples: int, num_files: int) -> TarShards:
    for number, part in enumerate(split(num_samples, num_files)):
        members = [(f"{index:05d}.{kind}", b"%d" % index) for index in part for kind in ("json", "cls")]
        write_tar(folder / f"{number:03d}.tar", members)
    return TarShards(folder, ("json", "cls"), transform=noise, index_dir=folder / "index")


def parquet(folder: Path, num_samples: int, num_files: int) -> ParquetRows:
    for number, part in enumerate(split(num_samples, num_files)):
        table = pyarrow.table({"value": [float(index) for index in part], "label": list(part)})
        pyarrow.parquet.write_table(table, folder / f"{number:03d}.parquet", row_group_size=3)
    # Room for one row group only, so that rows are read again and again.
    return ParquetRows(folder, ("value", "label"), transform=noise, cache_bytes=1)


def _noisy_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    items = [noise(item) for item in zip(batch["value"], batch["label"], strict=True)]
    return {"value": [value for value, _ in items], "label": [label for _, label in items]}


def hugging_face(folder: Path, num_samples: int, num_files: int) -> datasets.Dataset:
    import datasets

    parts = [
        datasets.Dataset.from_dict({"value": [float(index) for index in part], "label": list(part)})
        for part in split(num_samples, num_files)
    ]
    whole = datasets.concatenate_datasets(parts)
    whole.set_transform(_noisy_batch)
    return whole


def collate(items: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate pairs, and the dicts of Hugging Face."""
    pairs = [(item["value"], item["label"]) if isinstance(item, dict) else item for item in items]
    values, labels = zip(*pairs, strict=True)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(labels)


SOURCES: dict[str, Callable[[Path, int, int], Any]] = {
    "torch": Plain,
    "tar": tar,
    "parquet": parquet,
    "datasets": hugging_face,
}


def to_json(value: object) -> bytes:
    """Encode a value as the content of a .json file."""
    return json.dumps(value).encode()
