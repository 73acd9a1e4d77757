"""WebDataset's tar shards as a map-style dataset: any sample at any time, without extracting the shards."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

from samebits.data.image_file import MAX_FILE_BYTES
from samebits.data.sources.decoding import Decoder, decode_member
from samebits.data.sources.index_cache import IndexCache
from samebits.data.sources.local_files import OpenFiles, Paths, find_files, located
from samebits.data.sources.tar_index import ShardIndex
from samebits.errors import DataError


class TarShards:
    """WebDataset's tar shards as a map-style dataset: any sample by its index, read without extracting the shards.

    Files with the same name up to the first dot are one sample: `000123.jpg` and `000123.cls`. The headers of each
    shard are read once. Its index is kept in a cache folder, and used while the shard's size and modification time stay
    the same. Forked DataLoader workers share the index.

    A sample is decoded by the extensions of its files: images to (H, W, 3) uint8 arrays, `cls` to an int, `txt` to a
    str, `json` to its value, `npy` to an array. Others stay bytes. Pickles are never read.

    Args:
        shards: A .tar file, a folder of them, a pattern such as `train-{000..146}.tar` or `train-*.tar`, or a list of
            these. All are local files.
        columns: Extensions of the values of a sample, which is then a tuple, such as `("jpg;png", "cls")`: the first of
            `jpg` and `png` that it has, and `cls`. None: a sample is a dict of all its values by extension, and its
            name as `__key__`.
        decode: Functions bytes -> value, by extension. They replace the included ones; with `{"jpg": bytes}`, images
            are not decoded.
        transform: A function of each sample. Its random numbers must come from torch's, numpy's or Python's generators.
        index_dir: Folder for the indexes. None: `samebits/tar-index` in `$XDG_CACHE_HOME` or `~/.cache`.

    Attributes:
        files: Paths of the shards, in order.

    Raises:
        DataError: A shard is missing, compressed, truncated or damaged, or a sample has no file for a column.
    """

    def __init__(
        self,
        shards: Paths,
        columns: Sequence[str] | None = None,
        *,
        decode: Mapping[str, Decoder] | None = None,
        transform: Callable[[Any], Any] | None = None,
        index_dir: str | PathLike[str] | None = None,
    ) -> None:
        self.files = find_files(shards, ".tar")
        self._columns = None if columns is None else [tuple(column.lower().split(";")) for column in columns]
        self._decoders = {extension.lower(): function for extension, function in (decode or {}).items()}
        self._transform = transform
        cache = IndexCache(None if index_dir is None else Path(index_dir))
        self._indexes = [cache.index(path) for path in self.files]
        self._ends = list(accumulate(index.num_samples for index in self._indexes))
        self._open_files = OpenFiles(self.files, [index.stamp for index in self._indexes])
        for path, index in zip(self.files, self._indexes, strict=True):
            for alternatives in self._columns or ():
                _check_column(path, index, alternatives)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        shard, sample = located(self._ends, index)
        files, key = self._indexes[shard].files(sample), self._indexes[shard].key(sample)

        def value(extension: str) -> Any:
            name = f"{key}.{extension} in {self.files[shard]}"
            return decode_member(extension, self._read(shard, *files[extension], name), name, self._decoders)

        item: Any
        if self._columns is None:
            item = {"__key__": key, **{extension: value(extension) for extension in files}}
        else:
            item = tuple(value(next(each for each in column if each in files)) for column in self._columns)
        return item if self._transform is None else self._transform(item)

    def _read(self, shard: int, offset: int, size: int, name: str) -> bytes:
        # A file with holes can claim any size and take none on the disk.
        if size > MAX_FILE_BYTES:
            raise DataError(
                f"{name} has {size:,} bytes",
                allowed=f"up to {MAX_FILE_BYTES:,}",
                fix="Split the file, or leave the sample out of the shard.",
            )
        return self._open_files.read(shard, offset, size)


def _check_column(path: str, index: ShardIndex, alternatives: tuple[str, ...]) -> None:
    sample = index.first_without(alternatives)
    if sample is not None:
        raise DataError(
            f"sample {index.key(sample)} of {path} has no .{' or .'.join(alternatives)} file",
            given=" ".join(f".{extension}" for extension in index.files(sample)),
            fix="Set columns to extensions that all samples have, or write the shard again without this sample.",
        )
