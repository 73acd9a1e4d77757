"""Decoded pictures on disk, mapped into memory: what was decoded once need not be decoded again.

Any number of processes of one user may use one folder at the same time, and any of them may die at any moment: a file
is there whole or not at all. The folder grows to its limit and no further; what is in it never changes a result. A
folder that another user could write in is refused: pixels could be changed, or cut off while they are mapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import PIL
import simplejpeg

from lockstep.data.images import ByteArray
from lockstep.errors import DataError
from lockstep.scratch import partial_path, sweep_partials

LOGGER = logging.getLogger("lockstep")

# Magic, height, width, checksum of the pixels, and the boot of the machine that wrote the file.
_HEAD = struct.Struct("<8sIII16s")
_MAGIC = b"lockpix1"
_LONGEST_COUNT = 21
# What a folder holds beside its count: pictures by the first two digits of their names, and files being written.
_FOLDERS = re.compile(r"[0-9a-f]{2}|partial")
# Other versions may decode to other bits.
_DECODERS = f"{PIL.__version__} {simplejpeg.__version__}"


class DecodedPictures:
    """A folder of decoded pictures.

    Args:
        folder: Made if it is not there. May be deleted at any time.
        limit_bytes: It is not filled beyond this.

    Raises:
        DataError: The folder can't be made, belongs to another user, or holds links in the place of its own files.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = folder.expanduser(), limit_bytes
        self._is_full = False
        self._checked: set[Path] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _check_folder(self._folder)
            with self._used() as (used, _):
                LOGGER.info("decoded pictures: %s holds %s bytes of at most %s", self._folder, used, limit_bytes)
            sweep_partials(self._folder / "partial")
        except OSError as error:
            raise DataError(
                f"the folder {self._folder} for decoded pictures can't be used: {error.strerror or error}",
                fix="give a new folder as data.cache, or null for none",
            ) from error

    def read(self, path: Path, scale: int, size: tuple[int, int] | None = None) -> ByteArray | None:
        """What `keep` was given for this file at this scale, if it has not changed since; (H, W, 3) bytes.

        Args:
            path: The picture's file.
            scale: At which it was decoded.
            size: (width, height) that it must have; None for any.
        """
        place = self._place(path, scale)
        try:
            content = _mapped(place)
        except (OSError, ValueError):
            return None
        if len(content) <= _HEAD.size:
            return None
        magic, height, width, checksum, boot = _HEAD.unpack_from(content)
        if magic != _MAGIC or len(content) != _HEAD.size + height * width * 3:
            return None
        if size is not None and size != (width, height):
            return None
        pixels: ByteArray = np.frombuffer(content, np.uint8, offset=_HEAD.size)
        # Files are not flushed when they are written. A machine that stopped since may have lost what they held.
        if boot != _boot() and place not in self._checked:
            if zlib.adler32(pixels.data) != checksum:
                return None
            self._checked.add(place)
        return pixels.reshape(height, width, 3)

    def keep(self, path: Path, scale: int, pixels: ByteArray) -> None:
        """Keep a decoded picture, if there is room. What can't be written is left out."""
        place = self._place(path, scale)
        size = _HEAD.size + pixels.nbytes
        if self._is_full or place.exists():
            return
        partial = partial_path(self._folder / "partial" / place.name)
        try:
            if not self._reserve(size):
                return
            place.parent.mkdir(exist_ok=True)
            partial.parent.mkdir(exist_ok=True)
            pixels = np.ascontiguousarray(pixels)
            height, width = pixels.shape[:2]
            partial.unlink(missing_ok=True)  # of an earlier process with this number
            with partial.open("xb") as file:
                file.write(_HEAD.pack(_MAGIC, height, width, zlib.adler32(pixels.data), _boot()))
                file.write(pixels.data)
            partial.replace(place)
        except OSError as error:
            self._is_full = True
            LOGGER.warning("no more decoded pictures are kept in %s: %s", self._folder, error.strerror or error)
            with contextlib.suppress(OSError):
                partial.unlink()

    def _place(self, path: Path, scale: int) -> Path:
        try:
            status = path.stat()
            version = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            version = "gone"
        # A path can hold bytes that are not UTF-8.
        text = os.fsencode(f"{path.absolute()}\n{version}\n{scale}\n{_DECODERS}")
        name = hashlib.blake2b(text, digest_size=16).hexdigest()
        return self._folder / name[:2] / name[2:]

    def _reserve(self, size: int) -> bool:
        """Count bytes that are about to be written, if there is room for them."""
        with self._used() as (used, write):
            if used + size > self._limit_bytes:
                # A smaller picture might still fit; looking for it would cost more than it brings.
                self._is_full = True
                return False
            write(used + size)
        return True

    @contextlib.contextmanager
    def _used(self) -> Iterator[tuple[int, Callable[[int], None]]]:
        """(bytes in use, a function that sets them), with the folder to oneself."""
        # Not through a link, no FIFO, which would be waited for, and no file of that name that the user has written.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._folder / "used", flags, 0o644)
        with os.fdopen(descriptor, "rb+", buffering=0) as file:
            _check_own_file(os.fstat(descriptor), "used")
            with contextlib.suppress(OSError):  # without locks the count may be off, and no more
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read(_LONGEST_COUNT) or b""
            if text and not text.isdigit():
                raise OSError(errno.EEXIST, "it has a file called used in it that is not of decoded pictures")

            def write(used: int) -> None:
                file.truncate(0)
                file.write(b"%d" % used)

            used = int(text) if text else self._count()  # new, or its writer died in between
            if not text:
                write(used)
            yield used, write

    def _count(self) -> int:
        return sum(file.stat().st_size for file in self._folder.glob("??/*"))


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which somebody else may write, or in which links lead elsewhere.

    Raises:
        OSError: It is such a folder.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it belongs to another user, who could change the pictures in it")
    if status.st_mode & stat.S_IWOTH:
        raise OSError(errno.EPERM, "every user may write in it, and could change the pictures")
    with os.scandir(folder) as entries:
        for entry in entries:
            if _FOLDERS.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                raise OSError(errno.ENOTDIR, f"{entry.name} in it is a link or a file, not a folder of pictures")


def _check_own_file(status: os.stat_result, name: str) -> None:
    # A second name of a file elsewhere would be written to.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        raise OSError(errno.EEXIST, f"it has something called {name} in it that is not of decoded pictures")


def _mapped(place: Path) -> mmap.mmap:
    """A file of this user, mapped; no link is followed, and no FIFO waited for."""
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_own_file(os.fstat(descriptor), place.name)
        # Private, not read-only: torch warns of arrays that can't be written.
        return mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


@cache
def _boot() -> bytes:
    """This start of this machine, in 16 bytes; zeros where the system does not tell."""
    try:
        return bytes.fromhex(
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip().replace("-", "")
        )
    except (OSError, ValueError):
        return bytes(16)
