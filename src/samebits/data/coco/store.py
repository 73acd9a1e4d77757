"""Read the images of a dataset from a folder or from a zip file."""

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from samebits.data.image_file import MAX_FILE_BYTES, read_content, too_large
from samebits.data.images import ByteArray, EncodedImage
from samebits.errors import DataError

# Others have decoders whose memory the file decides on.
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Folder:
    """Images in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the names that it does not contain."""
        # List each folder once: a hundred thousand stat calls would take long on a file server.
        known: set[str] = set()
        for folder in {str(PurePosixPath(name).parent) for name in names}:
            try:
                with os.scandir(self.path / folder) as entries:
                    known.update(str(PurePosixPath(folder) / entry.name) for entry in entries)
            except OSError:
                continue
        return [name for name in names if str(PurePosixPath(name)) not in known]

    def files(self, names: Sequence[str]) -> list[str]:
        """Return the paths of the files that hold the images of these names."""
        return [f"{self.path}/{name}" for name in names]

    def read(self, name: str) -> bytes:
        """Read an image file."""
        return read_content(self.path / name)

    def pixels(self, name: str, size: tuple[int, int]) -> ByteArray:
        """Decode an image of (width, height) to (H, W, 3) RGB bytes as stored: annotations ignore the EXIF orientation.

        Raises:
            DataError: It is no image, is damaged, or has another size.
        """
        content, shown = self.read(name), f"{self.path}/{name}"
        image = EncodedImage(shown, content, upright=False)
        if image.size == size:
            return image.pixels()
        cause, fix = None, "Use images and annotations from the same source."
        if image.size == size[::-1]:
            cause = "the annotation has width and height swapped"
            if EncodedImage(shown, content).size == size:
                cause = "it was annotated after its EXIF rotation, which is not applied here"
                fix = "Apply the EXIF orientation to the image (mogrify -auto-orient)."
        raise DataError(
            f"the image {shown} is {image.size[0]}x{image.size[1]}, but {size[0]}x{size[1]} in its annotation",
            cause=cause,
            fix=fix,
        )


class Zip(Folder):
    """Images in a zip file, below any one folder of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file: zipfile.ZipFile | None = None
        self._pid = 0
        self._names: dict[str, str] = {}
        for member in self._opened().namelist():
            parts = PurePosixPath(member).parts
            for depth in (1, 0):  # an image at the top comes before one in a folder
                if len(parts) > depth:
                    self._names["/".join(parts[depth:])] = member

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the names that it does not contain."""
        return [name for name in names if str(PurePosixPath(name)) not in self._names]

    def files(self, names: Sequence[str]) -> list[str]:
        """Return the path of the zip file."""
        return [str(self.path)]

    def read(self, name: str) -> bytes:
        """Read an image file."""
        file = self._opened()
        try:
            member = file.getinfo(self._names[str(PurePosixPath(name))])
            # What is read is never more than the size given here, whatever the member unpacks to.
            if member.file_size > MAX_FILE_BYTES:
                raise too_large(f"{name} in {self.path}", member.file_size)
            if member.compress_type not in _PACKINGS:
                raise DataError(
                    f"{name} has an unsupported compression",
                    where=self.path,
                    fix="Compress it with deflate, or store it.",
                )
            return file.read(member)
        except DataError:
            raise
        except Exception as error:  # of a damaged file, zipfile raises whatever comes up
            raise DataError(
                f"{name} can't be read from {self.path}: {str(error) or type(error).__name__}",
                fix="Download the zip file again.",
            ) from error

    def _opened(self) -> zipfile.ZipFile:
        # After a fork, a DataLoader worker shares the file offset of its parent, so each process opens the file itself.
        if self._file is None or self._pid != os.getpid():
            try:
                self._file, self._pid = zipfile.ZipFile(self.path), os.getpid()
            except Exception as error:
                raise DataError(
                    f"{self.path} can't be opened: {error}",
                    allowed="a zip file of images",
                    fix="Download the zip file again.",
                ) from error
        return self._file


def open_store(candidates: Sequence[Path], names: Sequence[str], fix: str) -> Folder:
    """Open the first folder or zip file that exists; `fix`: what the user can do if some are missing, a sentence.

    Raises:
        DataError: None of them exists, or images are missing.
    """
    path = next((path for path in candidates if path.is_dir() or (path.suffix == ".zip" and path.is_file())), None)
    if path is None:
        raise DataError(
            "there is neither a folder nor a zip file of images",
            allowed="\n".join(map(str, candidates)),
            fix="Unpack the images into this folder, or copy the zip file there.",
        )
    store = Folder(path) if path.is_dir() else Zip(path)
    missing = store.missing(names)
    if missing:
        more = f" … and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        raise DataError(
            f"{len(missing):,} of {len(names):,} images are missing in {path}",
            given="\n".join(missing[:3]) + more,
            fix=fix,
        )
    return store
