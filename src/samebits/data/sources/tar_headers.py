"""Positions of the files in a tar archive, read from its headers by Python's `tarfile`. Nothing is extracted."""

import io
import os
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from samebits.errors import DataError, SamebitsError

BLOCK = 512
MAX_MEMBERS = 4_000_000  # of one archive
MAX_NAME_BYTES = 4096
MAX_EXTENDED_BYTES = 1 << 20  # of an extended header: a long name, or a few other values
_TAIL_BYTES = 1 << 26  # of zeros after the end that are checked for a second archive
_PACKED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ\x00": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
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
            f"{path} is damaged, or is not a tar archive", cause=str(error) or type(error).__name__, fix=_AGAIN
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
    if info.issym() or info.islnk():
        fix = "Write the shard again with tar --dereference --hard-dereference."
        return DataError(f"{path} has a link in place of a file", where=name, fix=fix)
    what = "a sparse file" if info.issparse() else f"an entry of type {info.type!r}"
    return DataError(f"{path} has {what}", where=name, allowed="plain files", fix="Write the shard again without it.")


def _check_end(path: str, descriptor: int, position: int, size: int) -> None:
    """Refuse an archive without an end mark, which `tarfile` reads as complete, or with a second one behind it."""
    mark = os.pread(descriptor, BLOCK, position)
    if len(mark) < BLOCK:
        raise DataError(f"{path} is truncated", cause=f"it ends at byte {size:,} without an end mark", fix=_AGAIN)
    if any(mark):
        raise DataError(f"{path} is damaged", where=f"header at byte {position:,}", fix=_AGAIN)
    for start in range(position, min(size, position + _TAIL_BYTES), 1 << 16):
        if any(os.pread(descriptor, 1 << 16, start)):
            raise DataError(
                f"{path} has more content after its end mark",
                cause="several archives were joined by cat",
                fix="Join them with tar --concatenate, or list them as separate shards.",
            )
