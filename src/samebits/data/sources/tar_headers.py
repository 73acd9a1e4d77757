"""Positions of the files in a tar archive, read from its headers only. Nothing is extracted.

Python's `tarfile` decodes each header. The walk over them is our own, since `tarfile` reads extended headers of any
size into memory, and takes an archive that is cut off between two files for a complete one.

    header | content, padded to 512 bytes | header | content | ... | two blocks of zeros
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from samebits.data.sources.local_files import Stamp
from samebits.errors import DataError

BLOCK = 512
MAX_MEMBERS = 4_000_000  # of one archive
MAX_NAME_BYTES = 4096
MAX_EXTENDED_BYTES = 1 << 20  # of an extended header: a long name, or a few other values
_TAIL_BYTES = 1 << 26  # of zeros after the end that are checked for a second archive
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME)
_SKIPPED = (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK)
_LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
_PACKED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ\x00": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
_AGAIN = "Copy or download the shard again."


class Member(NamedTuple):
    """A file in an archive.

    Attributes:
        name: Its name in the archive.
        offset: Position of its first byte.
        size: Size in bytes.
    """

    name: str
    offset: int
    size: int


def read_members(path: str, descriptor: int) -> Iterator[Member]:
    """Yield the regular files of an archive, in order.

    Args:
        path: Name of the archive in errors.
        descriptor: The open archive.

    Raises:
        DataError: The archive is compressed, truncated or damaged, has links, or a name leads out of its folder.
    """
    size = Stamp.of(descriptor).size
    _refuse_compressed(path, os.pread(descriptor, 8, 0))
    position, num_members, extended = 0, 0, dict[str, str]()
    while True:
        block = os.pread(descriptor, BLOCK, position)
        if len(block) < BLOCK:
            raise DataError(f"{path} is truncated", cause=f"it ends at byte {size:,} without an end mark", fix=_AGAIN)
        if not any(block):
            _check_end(path, descriptor, position, size)
            return
        info = _decode(path, block, position)
        is_extended = info.type in _EXTENDED or info.type in _SKIPPED
        content, num_bytes = position + BLOCK, info.size if is_extended else int(extended.get("size", info.size))
        if not 0 <= num_bytes <= size - content:
            raise DataError(
                f"{path} is truncated",
                where=f"{info.name} at byte {position:,}",
                cause=f"the header claims {num_bytes:,} bytes, and {max(0, size - content):,} are left",
                fix=_AGAIN,
            )
        position = content + -(-num_bytes // BLOCK) * BLOCK
        num_members += 1
        if num_members > MAX_MEMBERS:
            raise DataError(
                f"{path} has too many files", allowed=f"up to {MAX_MEMBERS:,}", fix="Write more, smaller shards."
            )
        if info.type in _EXTENDED:
            extended |= _extension(path, descriptor, info, num_bytes, content)
        elif not is_extended:
            name = _clean(path, extended.get("path", info.name))
            if info.type in _FILES:
                yield Member(name, content, num_bytes)
            elif info.type != tarfile.DIRTYPE:
                raise _not_a_file(path, name, info.type)
            extended = {}


def _refuse_compressed(path: str, head: bytes) -> None:
    command = next((name for magic, name in _PACKED.items() if head.startswith(magic)), None)
    if command is not None:
        raise DataError(
            f"{path} is compressed",
            cause="a compressed archive cannot be read at any position",
            fix=f"Unpack it to a plain .tar file with {command}. Images in it are compressed already.",
        )


def _decode(path: str, block: bytes, position: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise DataError(
            f"{path} is not a tar archive" if position == 0 else f"{path} is damaged",
            where=f"header at byte {position:,}",
            cause=str(error),
            fix=_AGAIN,
        ) from error


def _extension(path: str, descriptor: int, info: tarfile.TarInfo, size: int, offset: int) -> dict[str, str]:
    """Return the values of an extended header that count here: the name and the size of the next file."""
    if size > MAX_EXTENDED_BYTES:
        raise DataError(
            f"{path} has an extended header of {size:,} bytes",
            where=f"byte {offset:,}",
            allowed=f"up to {MAX_EXTENDED_BYTES:,}",
            cause="the shard is damaged, or made to exhaust memory",
            fix=_AGAIN,
        )
    content = os.pread(descriptor, size, offset)
    if info.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    try:
        values = dict(_records(content))
    except ValueError as error:
        raise DataError(f"{path} is damaged", where=f"extended header at byte {offset:,}", fix=_AGAIN) from error
    if any(name.startswith("GNU.sparse.") for name in values):
        raise _not_a_file(path, values.get("GNU.sparse.name", "a file"), tarfile.GNUTYPE_SPARSE)
    return {name: value for name, value in values.items() if name in ("path", "size")}


def _records(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield the records `LENGTH NAME=VALUE\\n` of a pax header."""
    position = 0
    while position < len(content) and content[position]:
        length, _, _ = content[position : position + 20].partition(b" ")
        if not length.isdigit() or int(length) <= len(length) + 1:
            raise ValueError("not a record")
        end = position + int(length)
        record = content[position + len(length) + 1 : end - 1]
        if end > len(content) or content[end - 1 : end] != b"\n" or b"=" not in record:
            raise ValueError("not a record")
        name, _, value = record.partition(b"=")
        text = value.decode("utf-8", "surrogateescape")
        if name == b"size":
            text = str(int(text))
        yield name.decode("utf-8", "surrogateescape"), text
        position = end


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


def _not_a_file(path: str, name: str, kind: bytes) -> DataError:
    if kind in _LINKS:
        fix = "Write the shard again with tar --dereference --hard-dereference."
        return DataError(f"{path} has a link in place of a file", where=name, fix=fix)
    what = "a sparse file" if kind == tarfile.GNUTYPE_SPARSE else f"an entry of type {kind!r}"
    return DataError(f"{path} has {what}", where=name, allowed="plain files", fix="Write the shard again without it.")


def _check_end(path: str, descriptor: int, position: int, size: int) -> None:
    """Refuse a second archive after the end of the first: its samples would be left out silently."""
    for start in range(position, min(size, position + _TAIL_BYTES), 1 << 16):
        if any(os.pread(descriptor, 1 << 16, start)):
            raise DataError(
                f"{path} has more content after its end mark",
                cause="several archives were joined by cat",
                fix="Join them with tar --concatenate, or list them as separate shards.",
            )
