"""WebDataset's tar shards as a map-style dataset: any sample at any time, without extracting the shards."""

import contextlib
import hashlib
import io
import logging
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samebits.data.images import MAX_FILE_BYTES
from samebits.data.keyed import IntArray
from samebits.data.sources.decoding import Decoder, decode_member
from samebits.data.sources.local_files import (
    Paths,
    changed,
    find_files,
    located,
    open_regular,
    read_part,
    stamp_of,
)
from samebits.errors import DataError, SamebitsError
from samebits.plain_file import open_plain
from samebits.scratch import check_own_folder, locked, partial_path, sweep_partials

# Positions of the files in a tar archive, read from its headers by Python's `tarfile`. Nothing is extracted.


BLOCK = 512
MAX_MEMBERS = 4_000_000  # of one archive
MAX_NAME_BYTES = 4096
MAX_EXTENDED_BYTES = 1 << 20  # of an extended header: a long name, or a few other values
_TAIL_BYTES = 1 << 26  # of zeros after the end that are checked for a second archive
_PACKED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\x00": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}
_AGAIN = "Copy or download the shard again."


class Member(NamedTuple):
    """A file in an archive."""

    name: str  #: Its name in the archive.
    offset: int  #: Position of its first byte.
    size: int  #: Size in bytes.


class _Headers(io.FileIO):
    """An archive of which `tarfile` reads only headers. It reads extended ones of any size into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_EXTENDED_BYTES:
            raise ValueError(f"it has an extended header of {size:,} bytes")
        return super().read(size) or b""


def read_members(path: str, descriptor: int) -> Iterator[Member]:
    """Yield the regular files of an archive, in order.

    Raises:
        DataError: The archive is compressed, truncated or damaged, has links, or a name leads out of its folder.
    """
    size = os.fstat(descriptor).st_size
    _refuse_compressed(path, os.pread(descriptor, 8, 0))
    try:
        with _Headers(descriptor, closefd=False) as file:
            # surrogateescape: a name may have bytes that are not UTF-8.
            archive = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
            for number in range(MAX_MEMBERS + 1):
                info = archive.next()
                if info is None:
                    break
                archive.members.clear()  # type: ignore[attr-defined]  # 1 KB for each of up to millions
                _check_size(path, info, size)
                name = _clean(path, info.name)
                if info.issparse() or not (info.isreg() or info.isdir()):
                    raise _not_a_file(path, name, info)
                if number == MAX_MEMBERS:
                    raise DataError(
                        f"{path} has too many files",
                        allowed=f"up to {MAX_MEMBERS:,}",
                        fix="Write more, smaller shards.",
                    )
                if info.isreg():
                    yield Member(name, info.offset_data, info.size)
            _check_end(path, descriptor, archive.offset, size)
    except SamebitsError:
        raise
    except Exception as error:  # of a damaged header, tarfile raises many types
        raise DataError(
            f"{path} is damaged, or is not a tar archive",
            cause=str(error) or type(error).__name__,
            fix=_AGAIN,
        ) from error


def _check_size(path: str, info: tarfile.TarInfo, size: int) -> None:
    left = size - info.offset_data
    if not 0 <= info.size <= left:
        raise DataError(
            f"{path} is truncated or damaged",
            where=f"{info.name[:MAX_NAME_BYTES]} at byte {info.offset:,}",
            cause=f"the header claims {info.size:,} bytes, and {max(0, left):,} are left",
            fix=_AGAIN,
        )


def _refuse_compressed(path: str, head: bytes) -> None:
    command = next((name for magic, name in _PACKED.items() if head.startswith(magic)), None)
    if command is not None:
        raise DataError(
            f"{path} is compressed",
            cause="a compressed archive cannot be read at any position",
            fix=f"Unpack it to a plain .tar file with {command}. Images in it are compressed already.",
        )


def _clean(path: str, name: str) -> str:
    """Return a name without a leading `./`. It is a key only, but programs may use keys as file names."""
    if len(name) > MAX_NAME_BYTES or "\0" in name:
        raise DataError(
            f"{path} has a name of {len(name):,} characters",
            allowed=f"up to {MAX_NAME_BYTES:,}, without NUL",
            fix=_AGAIN,
        )
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        raise DataError(
            f"{path} has a name that leads out of its folder",
            given=name,
            allowed="relative names without ..",
            fix="Write the shard again with relative names, or do not use it.",
        )
    return "/".join(part for part in parts if part not in ("", "."))


def _not_a_file(path: str, name: str, info: tarfile.TarInfo) -> DataError:
    what = "a sparse file" if info.issparse() else f"an entry of type {info.type!r}"
    fix = "Write the shard again without it."
    if info.issym() or info.islnk():
        what = "a link"
        fix = "Write the shard again with tar --dereference --hard-dereference."
    return DataError(
        f"{path} has {what} in place of a file", where=name, allowed="plain files", fix=fix
    )


def _check_end(path: str, descriptor: int, position: int, size: int) -> None:
    """Refuse an archive without an end mark, which `tarfile` reads as complete, or with a second one behind it."""
    mark = os.pread(descriptor, BLOCK, position)
    if len(mark) < BLOCK:
        raise DataError(
            f"{path} is truncated",
            cause=f"it ends at byte {size:,} without an end mark",
            fix=_AGAIN,
        )
    if any(mark):
        raise DataError(f"{path} is damaged", where=f"header at byte {position:,}", fix=_AGAIN)
    for start in range(position, min(size, position + _TAIL_BYTES), 1 << 16):
        if any(os.pread(descriptor, 1 << 16, start)):
            raise DataError(
                f"{path} has more content after its end mark",
                cause="several archives were joined by cat",
                fix="Join them with tar --concatenate, or list them as separate shards.",
            )


# Index of a tar shard: which files make each sample, and where they are.
#
# Files with the same name up to the first dot are one sample, as in WebDataset: `n01/000123.jpg` and `n01/000123.cls`.


LOGGER = logging.getLogger("samebits")

_MAX_EXTENSIONS = 1000
# Directory and name up to the first dot; then the extension. As in WebDataset, except that hidden files never count.
NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
META = re.compile(r"__[^/]*__")


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard, as arrays."""

    stamp: IntArray  #: (2,) size and modification time of the shard.
    starts: IntArray  #: (S + 1,) first file of each sample, in the arrays below; the last value is their length.
    offsets: IntArray  #: (M,) position of each file's content in the shard.
    sizes: IntArray  #: (M,) size of each file in bytes.
    codes: IntArray  #: (M,) extension of each file, as a position in `extensions`.
    extensions: npt.NDArray[np.str_]  #: The extensions, in lower case.
    key_starts: IntArray  #: (S + 1,) start of each sample's key in `key_bytes`; the last value is their length.
    key_bytes: npt.NDArray[np.uint8]  #: (K,) bytes of all keys.

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.starts) - 1

    def key(self, sample: int) -> str:
        """Return the key of a sample: the name of its files up to the first dot."""
        content = self.key_bytes[slice(*self.key_starts[sample : sample + 2])].tobytes()
        return content.decode("utf-8", "surrogateescape")

    def files(self, sample: int) -> dict[str, tuple[int, int]]:
        """Return offset and size of each file of a sample, by extension."""
        part = slice(*self.starts[sample : sample + 2])
        places = zip(self.offsets[part].tolist(), self.sizes[part].tolist(), strict=True)
        return dict(zip(self.extensions[self.codes[part]].tolist(), places, strict=True))

    def first_without(self, alternatives: tuple[str, ...]) -> int | None:
        """Return the first sample that has a file with none of some extensions; None if there is no such sample."""
        wanted = np.flatnonzero(np.isin(self.extensions, alternatives))
        # For a sample without files reduceat would take a file of the next one, but each sample has at least one.
        has_one = np.logical_or.reduceat(np.isin(self.codes, wanted), self.starts[:-1])
        missing = np.flatnonzero(~has_one)
        return int(missing[0]) if len(missing) else None


def build_index(path: str) -> ShardIndex:
    """Make the index of a shard by reading all of its headers.

    Raises:
        DataError: The shard cannot be read, is damaged, has no samples, or has a file twice.
    """
    descriptor = open_regular(path)
    try:
        stamp = stamp_of(descriptor)
        samples, num_nameless, extensions = _collect(path, descriptor)
        # The shard may have been written to while its headers were read.
        if stamp_of(descriptor) != stamp:
            raise changed(path)
    finally:
        os.close(descriptor)
    if not samples:
        raise DataError(
            f"{path} has no samples",
            given=f"{num_nameless:,} files without an extension" if num_nameless else "no files",
            allowed="files such as 000123.jpg and 000123.cls",
            fix="Name the files of a sample alike up to the first dot.",
        )
    if num_nameless:
        LOGGER.warning(
            "%s: %s files without an extension belong to no sample", path, f"{num_nameless:,}"
        )
    files = [place for sample in samples.values() for place in sample.items()]
    keys = [key.encode("utf-8", "surrogateescape") for key in samples]
    return ShardIndex(
        np.array(stamp),
        np.cumsum([0, *map(len, samples.values())], dtype=np.int64),
        np.array([offset for _, (offset, _) in files], np.int64),
        np.array([size for _, (_, size) in files], np.int64),
        np.array([code for code, _ in files], np.int64),
        np.array(list(extensions)),
        np.cumsum([0, *map(len, keys)], dtype=np.int64),
        np.frombuffer(b"".join(keys), np.uint8),
    )


def _collect(
    path: str, descriptor: int
) -> tuple[dict[str, dict[int, tuple[int, int]]], int, dict[str, int]]:
    """Return the files of each sample, (offset, size) by the code of their extension; the number of files without an
    extension; and the codes.
    """
    samples: dict[str, dict[int, tuple[int, int]]] = {}
    codes: dict[str, int] = {}
    num_nameless = 0
    for member in read_members(path, descriptor):
        match = NAME.fullmatch(member.name)
        base = member.name.rpartition("/")[2]
        if match is None or META.fullmatch(member.name):
            num_nameless += not base.startswith(".") and match is None
            continue
        files = samples.setdefault(match[1], {})
        extension = match[2].lower()
        code = codes.setdefault(extension, len(codes))
        if code in files:
            raise DataError(
                f"{path} has two files for .{extension} of one sample",
                where=member.name,
                cause="the name occurs twice, or differs only in upper and lower case",
                fix="Write the shard again, with another name for one of them.",
            )
        if len(codes) > _MAX_EXTENSIONS:
            raise DataError(
                f"{path} has more than {_MAX_EXTENSIONS:,} kinds of extensions",
                given=member.name,
                cause="the first dot of a name starts the extension",
                fix="Replace dots in the names of samples, such as by underscores.",
            )
        files[code] = (member.offset, member.size)
    return samples, num_nameless, codes


# Cache of the indexes of tar shards: one small file for each shard, made once on each machine.
#
# An index counts only for the size and modification time that its shard had. The user may delete the folder at any
# time.


_VERSION = "3"


class IndexCache:
    """A folder of indexes, used by any number of processes of one user.

    Args:
        folder: The folder, made if missing; None: `samebits/tar-index` in `$XDG_CACHE_HOME` (`~/.cache`). If that one
            cannot be used, each process makes the indexes for itself.

    Raises:
        DataError: The folder that the user gave cannot be used, or other users can write to it.
    """

    def __init__(self, folder: Path | None) -> None:
        home = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification: a relative path here is to be ignored.
        base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
        self._folder: Path | None = (folder or base / "samebits" / "tar-index").expanduser()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            check_own_folder(self._folder)
            sweep_partials(self._folder)
        except OSError as error:
            if folder is not None:
                raise DataError(
                    f"the folder {folder} can't be used for indexes: {error.strerror or error}",
                    fix="Set index_dir to a folder of your own.",
                ) from error
            LOGGER.warning(
                "indexes of tar shards are not kept: %s: %s", self._folder, error.strerror or error
            )
            self._folder = None

    def index(self, path: str) -> ShardIndex:
        """Return the index of a shard, from the folder or made now. Of several processes, one makes it.

        Raises:
            DataError: See `build_index`.
        """
        if self._folder is None:
            return build_index(path)
        name = hashlib.blake2b(os.fsencode(os.path.abspath(path)), digest_size=16).hexdigest()
        file = self._folder / f"{name}-{_VERSION}.npz"
        found = _load(file, path)
        if found is not None:
            return found
        with locked(self._folder / "lock"):
            # Looked for again under the lock: another process may have made it meanwhile.
            found = _load(file, path)
            if found is None:
                found = build_index(path)
                _save(file, path, found)
        return found


def _save(file: Path, path: str, index: ShardIndex) -> None:
    partial = partial_path(file)
    try:
        with partial.open("xb") as stream:
            # The checksums of zip files replace an fsync: an index that a crash has damaged is made again.
            np.savez(stream, **vars(index))
        partial.replace(file)
    except OSError as error:
        LOGGER.warning("the index of %s is not kept: %s", path, error.strerror or error)
        with contextlib.suppress(OSError):
            partial.unlink()


def _load(file: Path, path: str) -> ShardIndex | None:
    """Return the stored index of a shard; None if there is none for its present size and modification time."""
    try:
        with open_plain(file) as stream, np.load(stream, allow_pickle=False) as arrays:
            index = ShardIndex(**arrays)
        shard = os.stat(path)
    except (
        Exception
    ):  # there is none, or it is damaged, of which numpy and zipfile raise many types
        return None
    return index if index.stamp.tolist() == [shard.st_size, shard.st_mtime_ns] else None


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
        self._columns = (
            None if columns is None else [tuple(column.lower().split(";")) for column in columns]
        )
        self._decoders = {
            extension.lower(): function for extension, function in (decode or {}).items()
        }
        self._transform = transform
        cache = IndexCache(None if index_dir is None else Path(index_dir))
        self._indexes = [cache.index(path) for path in self.files]
        self._ends = list(accumulate(index.num_samples for index in self._indexes))
        for path, index in zip(self.files, self._indexes, strict=True):
            for alternatives in self._columns or ():
                _check_column(path, index, alternatives)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        shard, sample = located(self._ends, index)
        files = self._indexes[shard].files(sample)
        key = self._indexes[shard].key(sample)

        def value(extension: str) -> Any:
            name = f"{key}.{extension} in {self.files[shard]}"
            return decode_member(
                extension, self._read(shard, *files[extension], name), name, self._decoders
            )

        item: Any
        if self._columns is None:
            item = {"__key__": key, **{extension: value(extension) for extension in files}}
        else:
            item = tuple(
                value(next(each for each in column if each in files)) for column in self._columns
            )
        return item if self._transform is None else self._transform(item)

    def _read(self, shard: int, offset: int, size: int, name: str) -> bytes:
        # A file with holes can claim any size and take none on the disk.
        if size > MAX_FILE_BYTES:
            raise DataError(
                f"{name} has {size:,} bytes",
                allowed=f"up to {MAX_FILE_BYTES:,}",
                fix="Split the file, or leave the sample out of the shard.",
            )
        size_bytes, mtime_ns = self._indexes[shard].stamp.tolist()
        return read_part(self.files[shard], (size_bytes, mtime_ns), offset, size)


def _check_column(path: str, index: ShardIndex, alternatives: tuple[str, ...]) -> None:
    sample = index.first_without(alternatives)
    if sample is not None:
        raise DataError(
            f"sample {index.key(sample)} of {path} has no .{' or .'.join(alternatives)} file",
            given=" ".join(f".{extension}" for extension in index.files(sample)),
            fix="Set columns to extensions that all samples have, or write the shard again without this sample.",
        )
