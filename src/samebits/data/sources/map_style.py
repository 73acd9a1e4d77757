"""Reading samples of any map-style dataset, each with its own random numbers; and the refusal of streams.

The order of samples is a permutation of their indices (ADR 2), so a dataset needs `__len__` and `__getitem__`. A stream
has neither. Each rank would have to read all of it, and read it again from the start to resume.
"""

import sys
from os import PathLike
from typing import Any

from torch.utils.data import IterableDataset

from samebits.data.keyed import IntArray, KeyArray
from samebits.data.seeding import seeded
from samebits.errors import ConfigError, SamebitsError, SampleError, is_out_of_memory
from samebits.frames import error_line
from samebits.open_files import is_too_many_files


def check_map_style(dataset: Any) -> None:
    """Check that a dataset has samples at indices."""
    kind = type(dataset)
    has_indices = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if has_indices and not isinstance(dataset, IterableDataset):
        return
    length = "Give it a __len__ that returns the number of samples. If that is unknown: "
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    raise ConfigError(
        f"{kind.__name__} is a stream: it has no sample at an index",
        given="an IterableDataset"
        if isinstance(dataset, IterableDataset)
        else f"no {' and no '.join(missing)}",
        cause="exact order, resume and several ranks need any sample at any time",
        fix=(length if missing == ["__len__"] else "")
        + "Use a map-style dataset: samebits.TarShards for tar shards, samebits.ParquetRows for Parquet, "
        "load_dataset without streaming=True for Hugging Face. Or write the stream to a folder once: "
        "datasets.Dataset.from_generator(...).save_to_disk(folder), or WebDataset's ShardWriter for TarShards.",
    )


def files_of(dataset: Any) -> list[str | PathLike[str]] | None:
    """Return the files that a dataset lists in `files`, or in `samples` as torchvision's `ImageFolder`."""
    named = getattr(dataset, "files", None)
    if (
        isinstance(named, list)
        and named
        and all(isinstance(path, str | PathLike) for path in named)
    ):
        return named
    listed = getattr(dataset, "samples", None)
    if not isinstance(listed, list) or not listed:
        return None
    if not all(isinstance(item, tuple) and item and isinstance(item[0], str) for item in listed):
        return None
    return [item[0] for item in listed]


def read_items(dataset: Any, indices: IntArray, keys: KeyArray) -> list[Any]:
    """Read (N,) samples of a map-style dataset. The generators of torch, numpy and Python are seeded for each.

    Raises:
        SampleError: The dataset raised an exception.
    """
    if len(indices) and _reads_without_random_numbers(dataset):
        return list(dataset.__getitems__(indices.tolist()))
    items = []
    for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
        with seeded(key):
            try:
                items.append(dataset[index])
            except Exception as error:
                if isinstance(error, SamebitsError) or _is_of_the_machine(error):
                    raise
                first = str(error).strip().partition("\n")[0]
                raise SampleError(
                    f"sample {index:,} of {type(dataset).__name__} raised {type(error).__name__}: {first}",
                    where=error_line(error),
                    fix="Correct the dataset, or remove the sample. SAMEBITS_DEBUG=1 shows the traceback.",
                ) from error
    return items


def _is_of_the_machine(error: Exception) -> bool:
    """Return whether an exception is not the dataset's: its causes have their own errors.

    torch reports a killed DataLoader worker in a signal handler, hence anywhere in the rank's code.
    """
    is_lost_reader = isinstance(error, RuntimeError) and str(error).startswith(
        "DataLoader worker (pid"
    )
    return is_lost_reader or is_out_of_memory(error) or is_too_many_files(error)


def _reads_without_random_numbers(dataset: Any) -> bool:
    """Return whether this is a Hugging Face dataset without a transform of the user: it reads a batch much faster.

    Its transform would get the samples of a batch together, and could not draw each one's random numbers from its key.
    """
    module = sys.modules.get("datasets")
    kind = getattr(module, "Dataset", None)
    return kind is not None and type(dataset) is kind and dataset.format["type"] != "custom"
