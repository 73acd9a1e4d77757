"""Names of files: images in a folder, a part of them for validation, and names in untrusted lists."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from samebits.errors import DataError

ENDINGS = (
    ".jpg",
    ".jpeg",
    ".jfif",
    ".png",
    ".bmp",
    ".gif",
    ".webp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)

# Folders of thumbnails and deleted files that NAS systems, macOS and Windows make.
_SYSTEM_FOLDERS = (
    "@eaDir", "__MACOSX", "#recycle", "@Recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found",
)  # fmt: skip
_SYSTEM_FILES = ("thumbs.db", "desktop.ini")
_SHOWN = 6

# Virtual file systems of the kernel, which have no images and may not end.
_NO_FILES = tuple(map(Path, ("/proc", "/sys", "/dev")))


def first_outside(names: Iterable[str], folder: Path, root: Path) -> str | None:
    """Return the first name that leads out of a folder; None if all are inside.

    Names are compared as text: a symbolic link below the folder may lead anywhere, since the user made it.
    """
    # Resolved once, not for each name: a list may have millions.
    base = os.path.abspath(root.expanduser())
    inside = base if base.endswith(os.sep) else base + os.sep
    start = os.path.abspath(folder.expanduser())
    for name in names:
        if (".." in name or name.startswith(os.sep)) and not os.path.normpath(
            os.path.join(start, name)
        ).startswith(inside):
            return name
    return None


def outside(name: str, root: Path, *, where: str | None, fix: str) -> DataError:
    """Make the error for a name that leads out of a folder, `root`; `fix`: what the user can do, a sentence."""
    return DataError(
        f"{name} is not in the folder {root}",
        where=where,
        allowed="names relative to that folder, without .. out of it",
        fix=fix,
    )


def choose_validation(names: Sequence[str], fraction: float, seed: int) -> set[str]:
    """Choose the files of a validation split: a fraction of them, rounded down but at least one.

    The choice depends on the seed and the name of each file, so that added or deleted files move few others.
    """
    ranked = sorted(
        names, key=lambda name: hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=8).digest()
    )
    return set(ranked[: max(1, int(len(names) * fraction))])


def walk(root: Path, name: str, left_out: Counter[str] | None = None) -> list[str]:
    """List the images in a folder below the root, by relative paths, through links too; `left_out` counts others.

    Raises:
        DataError: A link points to a parent folder of the root, or to a folder of the system.
    """
    names = []
    seen = set()
    whole = Path(os.path.realpath(root))
    for folder, inner, files in os.walk(root / name, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a link back to a folder that was listed
            inner.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        if os.path.islink(folder):
            _check_link(folder, whole)
        if left_out is not None:
            _count_left_out(files, left_out)
        inner[:] = [each for each in inner if not is_of_system(each)]
        inner.sort()  # if several paths lead to the same folder, the choice is reproducible
        inside = Path(folder).relative_to(root).as_posix()
        names += [f"{inside}/{file}" for file in files if is_image(file)]
    return names


def _count_left_out(files: Iterable[str], counts: Counter[str]) -> None:
    """Count the files of a folder that are not used, by their ending."""
    for name in files:
        if name.startswith("._"):  # macOS writes them beside files on foreign disks
            counts["._*"] += 1
        elif not (is_image(name) or name.startswith(".") or name.lower() in _SYSTEM_FILES):
            counts[os.path.splitext(name)[1].lower() or "without an ending"] += 1


def is_of_system(folder: str) -> bool:
    """Return whether a folder of this name is hidden, or made by a system for thumbnails or deleted files."""
    return folder.startswith(".") or folder in _SYSTEM_FOLDERS


def left_out_row(counts: Mapping[str, int]) -> str:
    """Describe files that are not used, for the header of a run: "40 files .heic"."""
    most = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    texts = [f"{number:,} file{'s' if number > 1 else ''} {kind}" for kind, number in most[:_SHOWN]]
    return ", ".join(texts) + (" …" if len(most) > _SHOWN else "")


def overlap_rows(train: Iterable[str], validation: Iterable[str]) -> dict[str, str]:
    """Return header rows that warn of images in both sets and of repeated training images; empty without any."""
    trained = Counter(train)
    validated = list(validation)
    num_train = trained.total()
    num_shared = sum(path in trained for path in validated)
    num_repeated = num_train - len(trained)
    rows = {}
    if num_shared:
        rows["validation"] = (
            f"warning: {num_shared:,} of {len(validated):,} images are training images too"
        )
    if num_repeated:
        rows["training"] = (
            f"warning: {num_repeated:,} of {num_train:,} images are listed again, maybe with another label"
        )
    return rows


def _check_link(link: str, root: Path) -> None:
    target = Path(os.path.realpath(link))
    if target in root.parents or any(target.is_relative_to(folder) for folder in _NO_FILES):
        raise DataError(
            f"the link {link} points to {target}, not to a folder of images", fix="Remove the link."
        )


def is_image(name: str) -> bool:
    """Return whether a file of this name counts as an image."""
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def check_names(root: Path, names: Iterable[str]) -> None:
    """Refuse file names that are not UTF-8, because a run stores and prints them."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")
            raise DataError(f"a name in {root} is not UTF-8: {shown}", fix="Rename it.") from None


def skipped_row(skipped: Sequence[str]) -> str:
    """Describe the images left out, for the header of a run; empty if there are none."""
    if not skipped:
        return ""
    shown = ", ".join(list(skipped)[:3]) + (" …" if len(skipped) > 3 else "")
    return f"{len(skipped):,} unreadable image{'s' if len(skipped) > 1 else ''}: {shown}"
