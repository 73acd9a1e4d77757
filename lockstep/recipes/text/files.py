"""From settings to the lines of label files: which file, which of its lines, where its images are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.load import short_path
from lockstep.data.keyed import IntArray
from lockstep.data.names import first_outside, outside
from lockstep.errors import DataError
from lockstep.recipes.text.alphabet import UNKNOWN, Alphabet, read_alphabet, read_chars, show_character, text_of
from lockstep.recipes.text.config import LATIN, Config, DataConfig
from lockstep.recipes.text.images import GreyArray, nearest_width, packed_size, read_grey, read_packed, size_of
from lockstep.recipes.text.labels import Labels, read_labels

CHARS_NAME = "char_std_5990.txt"

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SelectedLines:
    """Those lines of a label file that are trained on or evaluated.

    Attributes:
        labels: All lines of the file.
        classes: Of all their characters.
        places: (N,) which of the lines.
        folder: Where images lie; None for LMDB.
        groups: (N,) group of width of each, where there are several.
        num_unknown: Lines left out for characters that the alphabet lacks.
        num_too_long: Lines left out as too long for their time steps.
    """

    labels: Labels
    classes: IntArray
    places: IntArray
    folder: Path | None
    groups: IntArray | None = None
    num_unknown: int = 0
    num_too_long: int = 0

    def label(self, index: int) -> IntArray:
        """The classes of a line's text."""
        place = int(self.places[index])
        return self.classes[self.labels.text_start(place) : int(self.labels.text_ends[place])]

    def picture(self, index: int) -> GreyArray:
        """A line's image, (H, W).

        Raises:
            DataError: It cannot be read; the line of the label file is named.
        """
        place = int(self.places[index])
        try:
            if self.folder is None:
                return read_packed(self.labels.path, int(self.labels.lines[place]))
            return read_grey(self.folder / self.labels.name(place))
        except DataError as error:
            raise DataError(error.what, **{"where": self.labels.where(place), **error.slots}) from None


def find_alphabet(config: DataConfig) -> Alphabet:
    """The network's alphabet: a file's; for synthetic lines digits and Latin letters; or what labels can say.

    Raises:
        DataError: A file cannot be read.
    """
    if config.alphabet is not None:
        return read_alphabet(config.alphabet)
    if config.is_synthetic:
        return Alphabet(LATIN)
    chars = chars_path(config)
    files = [read_labels(label_path(config, train=train), config, chars) for train in (True, False)]
    if chars is not None and files[0].is_index:
        # All that numbers can mean, in this order: so it does not depend on which lines there are.
        return Alphabet("".join(dict.fromkeys(filter(None, read_chars(chars)))))
    return Alphabet(text_of(np.unique(np.concatenate([labels.codes for labels in files]))))


def choose(config: Config, alphabet: Alphabet, *, train: bool) -> SelectedLines:
    """The lines to train on, or those held out.

    Raises:
        DataError: Labels cannot be read, images are not to be found, a text cannot be said with this alphabet or in
            the time steps that its image gives.
    """
    data = config.data
    path = label_path(data, train=train)
    labels = read_labels(path, data, chars_path(data))
    classes = alphabet.encode_codes(labels.codes)
    places = _part(len(labels), data.val_fraction, train=train)
    unknown = np.intersect1d(_unknown_lines(labels, classes), places)
    if len(unknown) and data.on_unknown == "error":
        raise _unknown_error(labels, alphabet, unknown)
    places = np.setdiff1d(places, unknown)
    folder = None if path.is_dir() else _picture_folder(labels, data, places)
    if folder is not None:
        _check_names(labels, data, places, folder)
    groups = _groups(labels, data.widths, places, folder) if len(data.widths) > 1 else None
    num_steps = np.array([config.model.num_steps(width) for width in data.widths], dtype=np.int64)
    allowed = num_steps[groups] if groups is not None else np.full(len(places), num_steps[0])
    needed = steps_needed(labels, classes)[places]
    fits = needed <= allowed
    if not fits.all() and data.on_too_long == "error":
        raise _too_long(labels, places, needed, allowed, fits)
    if not fits.any():
        raise DataError(f"{short_path(path)} has no line to {'train' if train else 'evaluate'} on")
    return SelectedLines(
        labels=labels,
        classes=classes,
        places=places[fits],
        folder=folder,
        groups=None if groups is None else groups[fits],
        num_unknown=len(unknown),
        num_too_long=int((~fits).sum()),
    )


def label_path(config: DataConfig, *, train: bool) -> Path:
    """The label file or LMDB folder to train with, or to evaluate on."""
    name = config.train if train or config.val_fraction is not None else config.eval
    if config.root is None:
        return Path(name or "")
    if name is None:
        name = "train.txt" if train or config.val_fraction is not None else "test.txt"
    return config.root.expanduser() / Path(name).expanduser()


def chars_path(config: DataConfig) -> Path | None:
    """The file that says what index labels mean, if there is one."""
    if config.chars is not None or config.root is None:
        return config.chars
    path = config.root.expanduser() / CHARS_NAME
    return path if path.is_file() else None


def steps_needed(labels: Labels, classes: IntArray) -> IntArray:
    """(N,) time steps that each text needs: its characters, and a blank between equal neighbours."""
    starts = np.concatenate([[0], labels.text_ends[:-1]])
    repeats = np.zeros(len(classes) + 1, dtype=np.int64)
    repeats[1:-1] = classes[1:] == classes[:-1]
    # The first character of a text has no neighbour before it.
    repeats[starts] = 0
    before = np.concatenate([[0], np.cumsum(repeats)])
    needed: IntArray = labels.text_ends - starts + before[labels.text_ends] - before[starts]
    return needed


def _part(num_lines: int, held_out: float | None, *, train: bool) -> IntArray:
    """The lines to train on or those held out, evenly spread over the file."""
    lines = np.arange(num_lines)
    if held_out is None:
        return lines
    is_out = np.floor((lines + 1) * held_out + 1e-9) > np.floor(lines * held_out + 1e-9)
    part: IntArray = lines[~is_out] if train else lines[is_out]
    return part


def _picture_folder(labels: Labels, config: DataConfig, places: IntArray) -> Path:
    """Where the first image is found, and so all of them."""
    if not len(places):
        return labels.path.parent
    name = labels.name(int(places[0]))
    beside = labels.path.parent
    folders = [beside, beside / "images"]
    if config.root is not None:
        folders += [config.root.expanduser(), config.root.expanduser() / "images"]
    if config.images is not None:
        folders = [config.images]
    found = next((folder for folder in folders if os.path.isfile(folder / name)), None)
    if found is None:
        raise DataError(
            f"the image {name[:200]} is not there",
            where=labels.where(int(places[0])),
            looked="\n".join(str(folder) for folder in dict.fromkeys(folders)),
            fix="data.images=FOLDER says where the images are",
        )
    return found


def _check_names(labels: Labels, config: DataConfig, places: IntArray, folder: Path) -> None:
    """Refuse a label file that names files outside of the data's folder."""
    if b".." not in labels.names and not labels.names.startswith(b"/") and b"\n/" not in labels.names:
        return
    root = config.images or config.root or labels.path.parent
    for place in places.tolist():
        name = first_outside([labels.name(place)], folder, root)
        if name is not None:
            do = "correct the line, or give a folder that all images are in as data.images"
            raise outside(name, root, where=labels.where(place), fix=do)


def _groups(labels: Labels, widths: tuple[int, ...], places: IntArray, folder: Path | None) -> IntArray:
    """The group of width of each line, from the heads of its image's file."""
    if folder is None:
        sizes = [packed_size(labels.path, int(labels.lines[place])) for place in places.tolist()]
    else:
        sizes = [size_of(folder / labels.name(place)) for place in places.tolist()]
    return nearest_width(widths, np.array(sizes, dtype=np.float64).reshape(-1, 2))


def _unknown_lines(labels: Labels, classes: IntArray) -> IntArray:
    """The places of labels with a character that has no class."""
    return np.unique(np.searchsorted(labels.text_ends, np.flatnonzero(classes == UNKNOWN), side="right"))


def _unknown_error(labels: Labels, alphabet: Alphabet, places: IntArray) -> DataError:
    """What is said of labels with characters that the alphabet lacks."""
    place = int(places[0])
    text = labels.text(place)
    missing = next(character for character in text if character not in alphabet.characters)
    return DataError(
        f"{labels.where(place)}: character {show_character(missing)} is not in the alphabet",
        given=text[:60],
        lines=f"{len(places):,} of {len(labels):,} have such characters",
        fix="data.on_unknown=skip leaves these lines out; data.alphabet=FILE gives another alphabet;\n"
        "data.normalise brings look-alikes together",
    )


def _too_long(labels: Labels, places: IntArray, needed: IntArray, allowed: IntArray, fits: BoolArray) -> DataError:
    first = int(np.flatnonzero(~fits)[0])
    place = int(places[first])
    return DataError(
        f"{labels.where(place)}: the text is too long for the network",
        given=labels.text(place)[:60],
        needed=f"{needed[first]} time steps: its characters, and one between equal neighbours; "
        f"data.width gives {allowed[first]}",
        lines=f"{int((~fits).sum()):,} of {len(places):,} are too long",
        fix="a larger data.width, or data.on_too_long=skip to leave them out",
    )
