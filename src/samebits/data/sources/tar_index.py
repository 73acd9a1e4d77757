"""Index of a tar shard: which files make each sample, and where they are.

Files with the same name up to the first dot are one sample, as in WebDataset: `n01/000123.jpg` and `n01/000123.cls`.
"""

import logging
import os
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samebits.data.keyed import IntArray
from samebits.data.sources.local_files import Stamp, changed, open_regular
from samebits.data.sources.tar_headers import read_members
from samebits.errors import DataError

LOGGER = logging.getLogger("samebits")

_MAX_EXTENSIONS = 1000
# Directory and name up to the first dot; then the extension. As in WebDataset, except that hidden files never count.
NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
META = re.compile(r"__[^/]*__")


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard."""

    stamp: Stamp  #: Size and modification time of the shard.
    starts: IntArray  #: (S + 1,) first file of each sample, in the arrays below; the last value is their length.
    offsets: IntArray  #: (M,) position of each file's content in the shard.
    sizes: IntArray  #: (M,) size of each file in bytes.
    codes: IntArray  #: (M,) extension of each file, as a position in `extensions`.
    extensions: tuple[str, ...]  #: The extensions, in lower case.
    key_ends: IntArray  #: (S,) end of each sample's key in `key_bytes`.
    key_bytes: npt.NDArray[np.uint8]  #: (K,) bytes of all keys.

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.key_ends)

    def key(self, sample: int) -> str:
        """Return the key of a sample: the name of its files up to the first dot."""
        start = int(self.key_ends[sample - 1]) if sample else 0
        return self.key_bytes[start : int(self.key_ends[sample])].tobytes().decode("utf-8", "surrogateescape")

    def files(self, sample: int) -> dict[str, tuple[int, int]]:
        """Return offset and size of each file of a sample, by extension."""
        first, last = int(self.starts[sample]), int(self.starts[sample + 1])
        places = zip(self.offsets[first:last].tolist(), self.sizes[first:last].tolist(), strict=True)
        return dict(zip((self.extensions[code] for code in self.codes[first:last].tolist()), places, strict=True))

    def first_without(self, alternatives: tuple[str, ...]) -> int | None:
        """Return the first sample that has a file with none of some extensions; None if there is no such sample."""
        wanted = [code for code, name in enumerate(self.extensions) if name in alternatives]
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
        stamp = Stamp.of(descriptor)
        samples, num_nameless, extensions = _collect(path, descriptor)
        # The shard may have been written to while its headers were read.
        if Stamp.of(descriptor) != stamp:
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
        LOGGER.warning("%s: %s files without an extension belong to no sample", path, f"{num_nameless:,}")
    files = [place for sample in samples.values() for place in sample.items()]
    keys = [key.encode("utf-8", "surrogateescape") for key in samples]
    return ShardIndex(
        stamp,
        np.cumsum([0, *(len(sample) for sample in samples.values())], dtype=np.int64),
        np.array([offset for _, (offset, _) in files], np.int64),
        np.array([size for _, (_, size) in files], np.int64),
        np.array([code for code, _ in files], np.int64),
        tuple(extensions),
        np.cumsum([len(key) for key in keys], dtype=np.int64),
        np.frombuffer(b"".join(keys), np.uint8),
    )


def _collect(path: str, descriptor: int) -> tuple[dict[str, dict[int, tuple[int, int]]], int, dict[str, int]]:
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
