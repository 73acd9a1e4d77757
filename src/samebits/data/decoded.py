"""Cache of decoded images on disk, mapped into memory (`data.cache`).

Any number of processes of one user can use a folder at the same time, and each can be killed at any moment: files are
written beside their name and renamed. The folder never exceeds its limit, and its content never changes a result. A
folder that another user can write to is refused: pixels could be changed, or truncated while they are mapped.
"""

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
from pathlib import Path

import numpy as np
import PIL
import simplejpeg

from samebits.data.images import ByteArray
from samebits.errors import DataError
from samebits.scratch import boot_id, check_own_folder, partial_path, sweep_partials

LOGGER = logging.getLogger("samebits")

# Magic, height, width, checksum of the pixels, and the boot of the machine that wrote the file.
_HEAD = struct.Struct("<8sIII16s")
_MAGIC = b"lockpix1"
_LONGEST_COUNT = 21
# Subfolders: images by the first two digits of their names, and partial files. The file "used" has the size in bytes.
_FOLDERS = re.compile(r"[0-9a-f]{2}|partial")
# Part of the key: other versions may decode to other bits.
_DECODERS = f"{PIL.__version__} {simplejpeg.__version__}"


class DecodedPictures:
    """A folder of decoded images.

    Args:
        folder: Created if missing. The user may delete it at any time.
        limit_bytes: Largest size of the folder in bytes.

    Raises:
        DataError: The folder cannot be made, belongs to another user, or has links instead of its own files.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder.expanduser()
        self._limit_bytes = limit_bytes
        self._is_full = False
        self._checked: set[Path] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _check_folder(self._folder)
            with self._used() as (used, _):
                LOGGER.info(
                    "decoded images: %s has %s of at most %s bytes", self._folder, used, limit_bytes
                )
            sweep_partials(self._folder / "partial")
        except OSError as error:
            raise DataError(
                f"data.cache: the folder {self._folder} can't be used: {error.strerror or error}",
                fix="Set data.cache to a new folder, or to null for no cache.",
            ) from error

    def read(self, path: Path, scale: int, size: tuple[int, int] | None = None) -> ByteArray | None:
        """Return a cached image; it has to have this (width, height), if given.

        Returns:
            (H, W, 3) bytes; None if the file is not cached at this scale, or has changed since.
        """
        file = self._file_of(path, scale)
        try:
            content = _mapped(file)
        # Missing, empty (which mmap refuses), or not this user's: the image is decoded again.
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
        # Files are written without fsync. After a crash of the machine their content may be lost, so the checksum is
        # verified once for files from before the last boot.
        if boot != _boot() and file not in self._checked:
            if zlib.adler32(pixels.data) != checksum:
                return None
            self._checked.add(file)
        return pixels.reshape(height, width, 3)

    def keep(self, path: Path, scale: int, pixels: ByteArray) -> None:
        """Store an image, (H, W, 3) bytes, if it fits within the limit. A failure to write ends all storing."""
        file = self._file_of(path, scale)
        size = _HEAD.size + pixels.nbytes
        if self._is_full or file.exists():
            return
        partial = partial_path(self._folder / "partial" / file.name)
        try:
            # Before writing: several processes that write at the same time stay within the limit together.
            if not self._reserve(size):
                return
            file.parent.mkdir(exist_ok=True)
            partial.parent.mkdir(exist_ok=True)
            pixels = np.ascontiguousarray(pixels)
            height, width = pixels.shape[:2]
            partial.unlink(missing_ok=True)  # of an earlier process with this process id
            # x (O_EXCL): follows no link, and takes no file that lies here already.
            with partial.open("xb") as stream:
                stream.write(_HEAD.pack(_MAGIC, height, width, zlib.adler32(pixels.data), _boot()))
                stream.write(pixels.data)
            # Renamed when complete: a reader maps the whole file or none.
            partial.replace(file)
        except OSError as error:
            self._is_full = True
            LOGGER.warning(
                "stopped caching decoded images in %s: %s", self._folder, error.strerror or error
            )
            with contextlib.suppress(OSError):
                partial.unlink()

    def _file_of(self, path: Path, scale: int) -> Path:
        try:
            status = path.stat()
            # A changed file has another key, so its old pixels are never taken for it.
            version = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            version = "gone"
        # A path can have bytes that are not UTF-8.
        text = os.fsencode(f"{path.absolute()}\n{version}\n{scale}\n{_DECODERS}")
        name = hashlib.blake2b(text, digest_size=16).hexdigest()
        return self._folder / name[:2] / name[2:]

    def _reserve(self, size: int) -> bool:
        """Add to the used bytes before writing. Returns False if the limit would be exceeded."""
        with self._used() as (used, write):
            if used + size > self._limit_bytes:
                # A smaller image might still fit, but trying costs more than it saves.
                self._is_full = True
                return False
            write(used + size)
        return True

    @contextlib.contextmanager
    def _used(self) -> Iterator[tuple[int, Callable[[int], None]]]:
        """Lock the folder, and return (used bytes, a function that sets them)."""
        # O_NOFOLLOW: not through a link. O_NONBLOCK: opening a FIFO would wait for a writer.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._folder / "used", flags, 0o644)
        with os.fdopen(descriptor, "rb+", buffering=0) as file:
            _check_own_file(os.fstat(descriptor), "used")
            with contextlib.suppress(OSError):  # without locks only the count may be wrong
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read(_LONGEST_COUNT) or b""
            if text and not text.isdigit():
                raise OSError(errno.EEXIST, "its entry used is not a file of such a cache")

            def write(used: int) -> None:
                # The position is behind the text that was read, but O_APPEND writes at the end, which is the start now.
                file.truncate(0)
                file.write(b"%d" % used)

            if text:
                used = int(text)
            else:  # a new folder, or its writer was killed in between
                used = sum(image.stat().st_size for image in self._folder.glob("??/*"))
                write(used)
            yield used, write


def _check_folder(folder: Path) -> None:
    """Refuse a folder to which other users can write, or that has links."""
    check_own_folder(folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            if _FOLDERS.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                raise OSError(
                    errno.ENOTDIR, f"{entry.name} in it is a link or a file, not a folder of images"
                )


def _check_own_file(status: os.stat_result, name: str) -> None:
    # With a second hard link, a write would change a file elsewhere.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        raise OSError(errno.EEXIST, f"its entry {name} is not a file of such a cache")


def _mapped(file: Path) -> mmap.mmap:
    """Map a regular file of this user. Follows no link and waits for no FIFO."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_own_file(os.fstat(descriptor), file.name)
        # Private instead of read-only: torch warns about arrays that are not writable.
        return mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def _boot() -> bytes:
    """Return the id of this boot of the machine, 16 bytes; zeros where the system has none."""
    return bytes.fromhex(boot_id().replace("-", "")).ljust(16, b"\0")
