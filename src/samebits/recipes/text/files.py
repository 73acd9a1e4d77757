"""Select the lines of label files by the settings: the file, its lines, and the folder of their images."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samebits.data.images import EncodedImage
from samebits.data.keyed import IntArray
from samebits.data.names import first_outside, outside
from samebits.data.sources.plain_text import escape_invisible, is_invisible
from samebits.errors import DataError
from samebits.plain_file import short_path
from samebits.recipes.text.alphabet import (
    CHARS_NAME,
    UNKNOWN,
    Alphabet,
    read_alphabet,
    read_chars,
    show_character,
    text_of,
)
from samebits.recipes.text.config import Config, DataConfig
from samebits.recipes.text.images import GrayArray, gray, nearest_width, open_packed
from samebits.recipes.text.labels import Labels, missing_images, read_labels

BoolArray = npt.NDArray[np.bool_]
_LOOKED_AT = 100  # images whose form is looked at
_LINE_LENGTH = 3  # characters, from which a line of usual writing is wider than high


@dataclass(frozen=True, eq=False)
class SelectedLines:
    """The lines of a label file that are used for training or validation."""

    labels: Labels  #: All lines of the file.
    classes: IntArray  #: Classes of all their characters.
    rows: IntArray  #: (N,) indices of the selected lines in `labels`.
    folder: Path | None  #: Folder of the images; None for LMDB.
    groups: IntArray | None = None  #: (N,) width group of each line; None if there is one width.
    num_unknown: int = 0  #: Lines left out because of characters that are not in the alphabet.
    num_too_long: int = 0  #: Lines left out because they need too many time steps.

    def label(self, index: int) -> IntArray:
        """Return the (length,) classes of a line."""
        row = int(self.rows[index])
        return self.classes[slice(*self.labels.text_starts[row : row + 2])]

    def names(self) -> Iterator[str]:
        """Return the path of each image; of LMDB, its folder and number."""
        folder = os.path.abspath(self.labels.path if self.folder is None else self.folder)
        for row in self.rows.tolist():
            yield f"{folder}/{self.labels.lines[row] if self.folder is None else self.labels.name(row)}"

    def image(self, index: int) -> GrayArray:
        """Read the image of a line: (H, W) bytes.

        Raises:
            DataError: It can't be read. Shows the line of the label file.
        """
        row = int(self.rows[index])
        try:
            return gray(_opened(self.labels, row, self.folder))
        except DataError as error:
            raise error.with_slots(where=error.slots.get("where", self.labels.where(row))) from None


def find_alphabet(config: DataConfig) -> Alphabet:
    """Find the alphabet: data.alphabet, or the characters of the labels.

    Raises:
        DataError: A file can't be read, or labels without data.alphabet have an invisible character.
    """
    if config.alphabet is not None:
        return read_alphabet(config.alphabet)
    chars = chars_path(config)
    files = [read_labels(label_path(config, train=train), config, chars) for train in (True, False)]
    if chars is not None and files[0].is_index:
        # All characters of data.chars, so that the classes do not depend on which of them the labels use.
        return Alphabet("".join(dict.fromkeys(filter(None, read_chars(chars)))))
    for labels in files:
        _refuse_invisible(labels)
    return Alphabet(text_of(np.unique(np.concatenate([labels.codes for labels in files]))))


def choose(config: Config, alphabet: Alphabet, *, train: bool) -> SelectedLines:
    """Select the training or the validation lines.

    Raises:
        DataError: Labels can't be read, images are missing, or a text has characters that are not in the alphabet or
            needs too many time steps.
    """
    data = config.data
    path = label_path(data, train=train)
    labels = read_labels(path, data, chars_path(data))
    classes = alphabet.encode_codes(labels.codes)
    rows = _split(len(labels), data.val_fraction, train=train)
    unknown = np.intersect1d(_rows_with(labels, classes == UNKNOWN), rows)
    if len(unknown) and data.on_unknown == "error":
        raise _unknown_error(labels, alphabet, unknown)
    rows = np.setdiff1d(rows, unknown)
    folder = None if path.is_dir() else _image_folder(labels, data, rows)
    if folder is not None:
        _check_names(labels, data, rows, folder)
    groups = None
    if len(data.widths) > 1:
        sizes = [_opened(labels, row, folder).size for row in rows.tolist()]
        groups = nearest_width(data.widths, np.array(sizes, dtype=np.float64).reshape(-1, 2))
    num_steps = np.array([config.model.num_steps(width) for width in data.widths], dtype=np.int64)
    allowed = num_steps[groups] if groups is not None else np.full(len(rows), num_steps[0])
    needed = steps_needed(labels, classes)[rows]
    fits = needed <= allowed
    if not fits.all() and data.on_too_long == "error":
        raise _too_long(labels, rows, needed, allowed, fits)
    if not fits.any():
        raise DataError(
            f"{short_path(path)} has no line to {'train' if train else 'evaluate'} on",
            fix="Check data.on_unknown, data.on_too_long and data.val_fraction, or add lines.",
        )
    return SelectedLines(
        labels=labels,
        classes=classes,
        rows=rows[fits],
        folder=folder,
        groups=None if groups is None else groups[fits],
        num_unknown=len(unknown),
        num_too_long=int((~fits).sum()),
    )


def check_images(lines: SelectedLines) -> None:
    """Check that the image of each line exists, before training."""
    labels = lines.labels
    rows = lines.rows.tolist()
    folder = lines.folder
    if folder is None:
        absent = missing_images(labels.path, labels.lines[lines.rows].tolist())
        missing = [row for row in rows if int(labels.lines[row]) in absent]
    else:
        missing = [row for row in rows if not os.path.isfile(folder / labels.name(row))]
    if missing:
        names = [
            escape_invisible(labels.name(row)) if folder else f"image-{labels.lines[row]:09d}"
            for row in missing
        ]
        raise DataError(
            f"{len(missing):,} of {len(rows):,} images of {short_path(labels.path)} are missing",
            given="\n".join(name[:200] for name in names[:3]) + ("\n…" if len(names) > 3 else ""),
            where=f"{labels.where(missing[0])}" + (f", in the folder {folder}" if folder else ""),
            fix="Restore the images, delete the lines, or set data.images to the folder of all images.",
        )


def turned_rows(lines: SelectedLines) -> dict[str, str]:
    """Return a header row that warns of images that are higher than wide: a line is squeezed in them."""
    lengths = np.diff(lines.labels.text_starts)[lines.rows]
    indices = np.flatnonzero(lengths >= _LINE_LENGTH)
    chosen = indices[:: max(1, len(indices) // _LOOKED_AT)].tolist()
    num_turned = 0
    for index in chosen:
        with suppress(DataError):  # an unreadable image is reported when it is read
            width, height = _opened(lines.labels, int(lines.rows[index]), lines.folder).size
            num_turned += height > width
    if 2 * num_turned <= len(chosen):
        return {}
    return {
        "images": f"warning: {num_turned} of {len(chosen)} images of lines are higher than wide: turn them by 90°"
    }


def label_path(config: DataConfig, *, train: bool) -> Path:
    """Return the label file or LMDB folder of the training or the validation lines."""
    name = config.train if train or config.val_fraction is not None else config.eval
    if config.root is None:
        return Path(name or "")
    if name is None:
        name = "train.txt" if train or config.val_fraction is not None else "test.txt"
    return config.root.expanduser() / Path(name).expanduser()


def chars_path(config: DataConfig) -> Path | None:
    """Return the file with the characters of index labels, if there is one."""
    if config.chars is not None or config.root is None:
        return config.chars
    path = config.root.expanduser() / CHARS_NAME
    return path if path.is_file() else None


def steps_needed(labels: Labels, classes: IntArray) -> IntArray:
    """Compute the (N,) time steps that each text needs: its characters, and a blank between equal neighbors."""
    starts = labels.text_starts
    repeats = np.zeros(len(classes) + 1, dtype=np.int64)
    repeats[1:-1] = classes[1:] == classes[:-1]
    # The first character of a text has no left neighbor.
    repeats[starts[:-1]] = 0
    before = np.concatenate([[0], np.cumsum(repeats)])
    needed: IntArray = np.diff(starts + before[starts])
    return needed


def _split(num_lines: int, val_fraction: float | None, *, train: bool) -> IntArray:
    """Return the training or validation rows; validation rows are evenly spaced over the file."""
    rows = np.arange(num_lines)
    if val_fraction is None:
        return rows
    # 1e-9: a product may be rounded down, as 100 * 0.29 is to 28.999999999999996.
    is_validation = np.floor((rows + 1) * val_fraction + 1e-9) > np.floor(
        rows * val_fraction + 1e-9
    )
    part: IntArray = rows[~is_validation] if train else rows[is_validation]
    return part


def _image_folder(labels: Labels, config: DataConfig, rows: IntArray) -> Path:
    """Find the folder that contains the first image, and so all of them."""
    if not len(rows):
        return labels.path.parent
    name = labels.name(int(rows[0]))
    beside = labels.path.parent
    folders = [beside, beside / "images"]
    if config.root is not None:
        folders += [config.root.expanduser(), config.root.expanduser() / "images"]
    if config.images is not None:
        folders = [config.images]
    found = next((folder for folder in folders if os.path.isfile(folder / name)), None)
    if found is None:
        raise DataError(
            f"the image {name[:200]} is missing",
            given=f"a line with the path {name[:200]!r} and the text {labels.text(int(rows[0]))[:80]!r}",
            where=labels.where(int(rows[0])),
            cause="it is in none of these folders:\n"
            + "\n".join(str(folder) for folder in dict.fromkeys(folders)),
            fix="Set data.images to the folder of the images. If path and text are divided at the wrong place,\n"
            "write a tab between them, and nothing else. If the line names the columns, delete it.",
        )
    return found


def _check_names(labels: Labels, config: DataConfig, rows: IntArray, folder: Path) -> None:
    """Refuse a label file that names files outside of the folder of the dataset."""
    if (
        b".." not in labels.names
        and not labels.names.startswith(b"/")
        and b"\n/" not in labels.names
    ):
        return
    root = config.images or config.root or labels.path.parent
    for row in rows.tolist():
        name = first_outside([labels.name(row)], folder, root)
        if name is not None:
            fix = "Correct the line, or set data.images to a folder that contains all images."
            raise outside(name, root, where=labels.where(row), fix=fix)


def _opened(labels: Labels, row: int, folder: Path | None) -> EncodedImage:
    """Open the image of a line: a file, or without a folder an entry of LMDB."""
    if folder is None:
        return open_packed(labels.path, int(labels.lines[row]))
    return EncodedImage(folder / labels.name(row))


def _rows_with(labels: Labels, chosen: BoolArray) -> IntArray:
    """Return the rows of labels with one of the chosen characters, given for each of `labels.codes`."""
    return np.unique(np.searchsorted(labels.text_starts[1:], np.flatnonzero(chosen), side="right"))


def _refuse_invisible(labels: Labels) -> None:
    """Refuse characters that would become classes although no image shows them."""
    invisible = [sign for sign in text_of(np.unique(labels.codes)) if is_invisible(sign)]
    if not invisible:
        return
    rows = _rows_with(labels, np.isin(labels.codes, [ord(sign) for sign in invisible]))
    text = labels.text(int(rows[0]))
    first = next(sign for sign in text if sign in invisible)
    raise DataError(
        f"a label has the invisible character {show_character(first)}",
        given=escape_invisible(text)[:60],
        where=labels.where(int(rows[0])),
        cause=f"{len(rows):,} of {len(labels):,} lines have such characters, which would become classes",
        fix="Remove it from the labels. If it is to be a class, set data.alphabet to a file with all characters.",
    )


def _unknown_error(labels: Labels, alphabet: Alphabet, rows: IntArray) -> DataError:
    row = int(rows[0])
    text = labels.text(row)
    missing = next(character for character in text if character not in alphabet.characters)
    return DataError(
        f"character {show_character(missing)} is not in the alphabet",
        given=text[:60],
        where=labels.where(row),
        cause=f"{len(rows):,} of {len(labels):,} lines have such characters",
        fix="Set data.on_unknown=skip to leave these lines out, data.alphabet to another alphabet,\n"
        "or data.normalize to unify variants of characters.",
    )


def _too_long(
    labels: Labels, rows: IntArray, needed: IntArray, allowed: IntArray, fits: BoolArray
) -> DataError:
    first = int(np.flatnonzero(~fits)[0])
    row = int(rows[first])
    return DataError(
        f"the text is too long for the network: it needs {needed[first]} time steps",
        given=labels.text(row)[:60],
        where=labels.where(row),
        allowed=f"{allowed[first]} time steps at this data.width: one per character, and one between equal neighbors",
        cause=f"{int((~fits).sum()):,} of {len(rows):,} lines are too long",
        fix="Increase data.width, or set data.on_too_long=skip to leave these lines out.",
    )
