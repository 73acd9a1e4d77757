"""Where a data set's pictures lie: in a folder, or in the zip that they ship in."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from lockstep.data.images import JpegHead, decode_plain_jpeg
from lockstep.errors import DataError
from lockstep.recipes.pose.affine import Pixels

END_OF_JPEG = b"\xff\xd9"
_ZIP_FAULTS = (OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)


class Store(Protocol):
    """A place that pictures are read from by name."""

    @property
    def title(self) -> str:
        """What a person calls it: a folder, a file."""

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of some pictures that it does not hold."""

    def read(self, name: str) -> bytes:
        """A picture's file."""


class Folder:
    """Pictures in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.title = str(path)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of some pictures that it does not hold."""
        # One look at each folder: a hundred thousand questions about single files would take long on a file server.
        folders = {str(PurePosixPath(name).parent) for name in names}
        known: set[str] = set()
        for folder in folders:
            try:
                with os.scandir(self._path / folder) as entries:
                    known.update(str(PurePosixPath(folder) / entry.name) for entry in entries)
            except OSError:
                continue
        return [name for name in names if str(PurePosixPath(name)) not in known]

    def read(self, name: str) -> bytes:
        """A picture's file."""
        try:
            return (self._path / name).read_bytes()
        except OSError as error:
            raise DataError(f"{self._path / name} can't be read: {error.strerror or error}") from error


class Zip:
    """Pictures in a zip file, below any one folder of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.title = str(path)
        self._file: zipfile.ZipFile | None = None
        self._pid = 0
        self._names: dict[str, str] = {}
        for member in self._opened().namelist():
            parts = PurePosixPath(member).parts
            for depth in (1, 0):  # a picture at the top comes before one in a folder
                if len(parts) > depth:
                    self._names["/".join(parts[depth:])] = member

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of some pictures that it does not hold."""
        return [name for name in names if str(PurePosixPath(name)) not in self._names]

    def read(self, name: str) -> bytes:
        """A picture's file."""
        try:
            return self._opened().read(self._names[str(PurePosixPath(name))])
        except _ZIP_FAULTS as error:
            raise DataError(f"{name} can't be read from {self._path}: {str(error) or type(error).__name__}") from error

    def _opened(self) -> zipfile.ZipFile:
        # After a fork, a loader process shares its parent's place in the file: each opens its own.
        if self._file is None or self._pid != os.getpid():
            try:
                self._file, self._pid = zipfile.ZipFile(self._path), os.getpid()
            except (OSError, zipfile.BadZipFile) as error:
                raise DataError(f"{self._path} can't be opened: {error}", expected="a zip file of pictures") from error
        return self._file


def open_store(candidates: Sequence[Path]) -> Store:
    """The first of some folders and zip files that is there.

    Raises:
        DataError: There is none of them.
    """
    for path in candidates:
        if path.is_dir():
            return Folder(path)
        if path.suffix == ".zip" and path.is_file():
            return Zip(path)
    raise DataError(
        "there is neither a folder nor a zip file of pictures",
        looked="\n".join(map(str, candidates)),
        do="unpack the pictures there, or put the zip there as it ships",
    )


def _check_size(name: str, found: tuple[int, int], annotated: tuple[int, int]) -> None:
    if found != annotated:
        raise DataError(
            f"the picture {name} is {found[0]}x{found[1]}, its annotation says {annotated[0]}x{annotated[1]}",
            likely="it was annotated as EXIF turns it; pictures are taken as they are stored"
            if found == annotated[::-1]
            else None,
            do="take pictures and annotations from one source",
        )


def decode(content: bytes, name: str, size: tuple[int, int]) -> Pixels:
    """A picture's file -> (H, W, 3) bytes, red, green, blue, as it is stored: annotations ignore how EXIF turns it.

    Args:
        content: The file.
        name: What to call it in an error.
        size: (width, height) that it has to have.

    Raises:
        DataError: It is no picture, is damaged, or has another size.
    """
    head = JpegHead.find(content)
    try:
        # The quick way says nothing of a file that is cut off: those have no end marker, and go to Pillow.
        if head is not None and head.is_plain and content.endswith(END_OF_JPEG):
            _check_size(name, head.size, size)
            return decode_plain_jpeg(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # twice as large is an error
            image = Image.open(io.BytesIO(content))
        _check_size(name, image.size, size)
        pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Image.DecompressionBombError as error:
        raise DataError(f"the picture {name} claims to be enormous", reason=error) from error
    except UnidentifiedImageError as error:
        raise DataError(f"{name} is not a picture", expected="JPEG, PNG or another form that Pillow reads") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"the picture {name} is damaged: {error}", do="put a whole one in its place") from error
    return pixels
