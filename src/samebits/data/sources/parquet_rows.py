"""Parquet files as a map-style dataset: a row by its index, through row groups that are decoded whole and cached."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from samebits.data.sources.decoding import Decoder
from samebits.data.sources.local_files import (
    Paths,
    Stamp,
    changed,
    find_files,
    located,
    open_regular,
    stamp_of,
)
from samebits.errors import ConfigError, DataError
from samebits.extras import require

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

LOGGER = logging.getLogger("samebits")

MAX_ROW_GROUP_BYTES = 1 << 30  # decoded
_SMALL_GROUP_BYTES = 1 << 26
_MAX_RATIO = 100
_LARGE_BYTES = 1 << 25  # of a row group: decoding it takes tens of milliseconds
_MAX_BATCH_ROWS = 4096
_AGAIN = "Copy or download the file again, or write it again."


class RowGroup(NamedTuple):
    """A part of a file that can be decoded alone."""

    file: int  #: Position of the file in the list of files.
    number: int  #: Number of the row group in the file.
    num_rows: int  #: Number of its rows.
    num_bytes: int  #: Size of its columns without compression, as the file claims, in bytes.


class ParquetRows:
    """Parquet files as a map-style dataset: any row by its index.

    Parquet has no smaller unit than a row group, so the first row of one costs decoding all of its rows. A process
    keeps the row groups used last, up to `cache_bytes`. In random order this is fast only if row groups are small, or
    all of them fit into `cache_bytes`. Otherwise write the files again with smaller ones (`row_group_size=100` of
    `pyarrow.parquet.write_table`), or let Hugging Face `datasets` convert them to Arrow.

    Requires pyarrow: `pip install "samebits[parquet]"`.

    Args:
        files: A .parquet file, a folder of them, a pattern such as `train-*.parquet`, or a list of these, all local.
        columns: Names of the columns; a row is then a tuple in this order, such as (input, target). None: a row is a
            dict of all columns.
        decode: Functions value -> value, by column, such as `{"image": samebits.decode_rgb}`.
        transform: A function of each row. Its random numbers must come from torch's, numpy's or Python's generators.
        cache_bytes: Memory for decoded row groups in each process, in bytes. One row group is kept in any case.

    Attributes:
        files: Paths of the files, in order.

    Raises:
        ConfigError: pyarrow is not installed, or a file has no such column.
        DataError: A file is missing or damaged, or has a row group of more than 1 GiB.
    """

    def __init__(
        self,
        files: Paths,
        columns: Sequence[str] | None = None,
        *,
        decode: Mapping[str, Decoder] | None = None,
        transform: Callable[[Any], Any] | None = None,
        cache_bytes: int = 256 << 20,
    ) -> None:
        require_pyarrow()
        self.files = find_files(files, ".parquet")
        self._columns = None if columns is None else list(columns)
        self._decode = dict(decode or {})
        self._transform = transform
        self._cache_bytes = cache_bytes
        self._stamps: list[Stamp] = []
        self._groups: list[RowGroup] = []
        for number, path in enumerate(self.files):
            file, stamp = _open(path)
            self._stamps.append(stamp)
            with reading(path), file:
                self._check_columns(path, file)
                self._groups += _row_groups(path, number, file.metadata)
        self._ends = list(accumulate(group.num_rows for group in self._groups))
        if not self._ends:
            raise DataError(f"{self.files[0]} has no rows", fix="Name files with rows.")
        self._cached: OrderedDict[int, pyarrow.Table] = OrderedDict()
        self._advise()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number, row = located(self._ends, index)
        with reading(self.files[self._groups[number].file]):
            values: dict[str, Any] = self._table(number).slice(row, 1).to_pylist()[0]
        for name, function in self._decode.items():
            if name in values:
                values[name] = function(values[name])
        item: Any = (
            values if self._columns is None else tuple(values[name] for name in self._columns)
        )
        return item if self._transform is None else self._transform(item)

    def __getstate__(self) -> dict[str, object]:
        # A started process decodes row groups of its own.
        return {**self.__dict__, "_cached": OrderedDict()}

    def _check_columns(self, path: str, file: pyarrow.parquet.ParquetFile) -> None:
        names = file.schema_arrow.names
        for name in (*(self._columns or ()), *self._decode):
            if name not in names:
                raise ConfigError(
                    f"{path} has no column {name}",
                    allowed=", ".join(names),
                    fix="Correct the name in columns.",
                )

    def _advise(self) -> None:
        """Log a hint if reading in random order will be slow."""
        num_bytes = sum(group.num_bytes for group in self._groups)
        mean = num_bytes // len(self._groups)
        if mean > _LARGE_BYTES and num_bytes > self._cache_bytes:
            LOGGER.warning(
                "%s: row groups have %s MB on average, and each random read decodes one whole. Write the files again "
                "with smaller ones, such as row_group_size=100, or set cache_bytes to %s or more.",
                self.files[0], f"{mean / 1e6:,.0f}", f"{num_bytes:,}",
            )  # fmt: skip

    def _table(self, number: int) -> pyarrow.Table:
        """Return a decoded row group."""
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        table = self._read(self._groups[number])
        self._cached[number] = table
        while (
            len(self._cached) > 1
            and sum(each.nbytes for each in self._cached.values()) > self._cache_bytes
        ):
            self._cached.popitem(last=False)
        return table

    def _read(self, group: RowGroup) -> pyarrow.Table:
        import pyarrow

        path = self.files[group.file]
        # Opened for each row group: reading the footer takes little beside decoding it.
        file, stamp = _open(path)
        if stamp != self._stamps[group.file]:
            raise changed(path)
        # A value is at most as large as its column. With so few rows a batch stays within the limit, even if a small
        # file repeats a long value in each row.
        num_rows = max(1, min(_MAX_BATCH_ROWS, MAX_ROW_GROUP_BYTES // max(1, group.num_bytes)))
        batches = []
        num_bytes = 0
        # No threads: pyarrow's pool does not survive the fork of a DataLoader worker.
        with file:
            for batch in file.iter_batches(
                num_rows, [group.number], self._columns, use_threads=False
            ):
                batches.append(batch)
                num_bytes += batch.nbytes
                if num_bytes > MAX_ROW_GROUP_BYTES:
                    raise _too_large(path, group.number, "more than its footer claims")
        table = pyarrow.Table.from_batches(batches)
        if table.num_rows != group.num_rows:
            raise DataError(
                f"{path} is damaged",
                where=f"row group {group.number}",
                given=f"{table.num_rows:,} rows",
                allowed=f"{group.num_rows:,}, as its footer claims",
                fix=_AGAIN,
            )
        return table


def require_pyarrow() -> None:
    """Check that pyarrow is installed."""
    require("parquet", "reading Parquet")


def _open(path: str) -> tuple[pyarrow.parquet.ParquetFile, Stamp]:
    import pyarrow.parquet

    # For the checks and the stamp alone: pyarrow opens the path itself.
    descriptor = open_regular(path)
    stamp = stamp_of(descriptor)
    os.close(descriptor)
    with reading(path):
        # pre_buffer reads ahead in threads, which a forked process lacks.
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False), stamp


def _row_groups(path: str, file: int, metadata: pyarrow.parquet.FileMetaData) -> Iterator[RowGroup]:
    """Yield the row groups of a file that have rows, after a check of what its footer claims.

    The metadata of single columns is left alone: of a damaged footer, pyarrow 26 ends the process when it is read.
    """
    num_rows = 0
    file_bytes = os.stat(path).st_size
    for number in range(metadata.num_row_groups):
        found = metadata.row_group(number)
        group = RowGroup(file, number, found.num_rows, found.total_byte_size)
        num_rows += group.num_rows
        if group.num_rows < 0 or group.num_bytes < 0:
            raise DataError(
                f"{path} is damaged",
                where=f"row group {number}",
                cause="a negative size",
                fix=_AGAIN,
            )
        if group.num_bytes > MAX_ROW_GROUP_BYTES:
            raise _too_large(path, number, f"{group.num_bytes:,} bytes")
        # Images do not shrink by Parquet's compression. A bomb of 7 kB has one value of 100 MB, once for each row.
        if group.num_bytes > max(_SMALL_GROUP_BYTES, _MAX_RATIO * file_bytes):
            raise _too_large(
                path, number, f"{group.num_bytes:,} bytes, from a file of {file_bytes:,}"
            )
        if group.num_rows:
            yield group
    if num_rows != metadata.num_rows:
        given = f"{num_rows:,} rows in row groups, {metadata.num_rows:,} in the file"
        raise DataError(f"{path} is damaged", given=given, fix=_AGAIN)


def _too_large(path: str, number: int, given: str) -> DataError:
    return DataError(
        f"row group {number} of {path} is too large to be decoded for a single row",
        given=given,
        allowed=f"up to {MAX_ROW_GROUP_BYTES:,} bytes",
        fix="Write the file again with smaller row groups, such as row_group_size=100.",
    )


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert the errors of the library to errors for the user."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise DataError(
            f"{path} can't be read as Parquet", cause=str(error) or type(error).__name__, fix=_AGAIN
        ) from error
