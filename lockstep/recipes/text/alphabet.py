"""Characters and classes: blank is class 0, the alphabet's first character class 1.

Whole label files are encoded, and whole batches decoded, at once: text goes through its code points as one array.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.plain_file import read_plain
from lockstep.data.keyed import IntArray
from lockstep.errors import DataError

BLANK = 0
UNKNOWN = -1
MAX_CHARACTERS = 100_000  # more than Unicode has Han characters; the network's last layer has a row for each
MAX_ALPHABET_BYTES = 1 << 24  # Unicode has a million characters of up to four bytes

CodeArray = npt.NDArray[np.uint32]


class Alphabet:
    """The characters that a network can read, in the order of its classes.

    Args:
        characters: Each one code point, each once.

    Raises:
        DataError: There are none, or one comes twice.
    """

    def __init__(self, characters: str) -> None:
        if not characters:
            raise DataError("the alphabet is empty", allowed="at least one character")
        if len(characters) > MAX_CHARACTERS:
            raise DataError(f"the alphabet has {len(characters):,} characters", allowed=f"up to {MAX_CHARACTERS:,}")
        seen: set[str] = set()
        for place, character in enumerate(characters):
            if character in seen:
                raise DataError(
                    f"the alphabet has {show_character(character)} twice",
                    where=f"characters {characters.index(character) + 1:,} and {place + 1:,}",
                )
            seen.add(character)
        self.characters = characters
        self._codes = codes_of(characters)
        self._sorted = np.argsort(self._codes, kind="stable")

    def __len__(self) -> int:
        return len(self.characters)

    @property
    def num_classes(self) -> int:
        """Characters and blank."""
        return len(self) + 1

    def encode(self, text: str) -> IntArray:
        """The classes of a text, (L,); UNKNOWN for what is not in the alphabet."""
        return self.encode_codes(codes_of(text))

    def encode_codes(self, codes: CodeArray) -> IntArray:
        """The classes of (L,) code points."""
        ordered = self._codes[self._sorted]
        places = np.minimum(np.searchsorted(ordered, codes), len(ordered) - 1)
        return np.where(ordered[places] == codes, self._sorted[places] + 1, UNKNOWN).astype(np.int64)

    def decode(self, classes: IntArray) -> str:
        """The text of (L,) classes, none of them blank: the inverse of `encode`."""
        return text_of(self._codes[classes - 1])

    def decode_paths(self, paths: IntArray, lengths: Sequence[int] | None = None) -> list[str]:
        """What paths through the time steps say: equal neighbours are one, then blanks fall away.

        Args:
            paths: (N, T) classes, one for each time step.
            lengths: How many of the T steps count for each path; all if left out.

        Returns:
            N texts.
        """
        before = np.empty_like(paths)
        before[:, :1], before[:, 1:] = BLANK, paths[:, :-1]
        counts = (paths != BLANK) & (paths != before)
        if lengths is not None:
            counts &= np.arange(paths.shape[1]) < np.asarray(lengths)[:, None]
        together = self.decode(paths[counts])
        ends = np.cumsum(counts.sum(axis=1)).tolist()
        return [together[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []

    def show_paths(self, paths: IntArray) -> list[str]:
        """(N, T) classes -> one character for each time step, blanks as "-"."""
        table = np.concatenate([codes_of("-"), self._codes])
        return [text_of(table[path]) for path in paths]


def read_alphabet(path: Path) -> Alphabet:
    """An alphabet from a UTF-8 file: all characters on one line, or one on each line.

    Raises:
        DataError: The file cannot be read, or is neither.
    """
    try:
        text = read_plain(path, MAX_ALPHABET_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", where=f"byte {error.start}", fix="save it as UTF-8") from error
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line]
    if len(lines) > 1:
        long = [number for number, line in enumerate(lines, start=1) if len(line) > 1]
        if long:
            raise DataError(
                f"{path}:{long[0]} has {len(lines[long[0] - 1])} characters",
                allowed="all characters on one line, or one on each line",
            )
    try:
        return Alphabet("".join(lines))
    except DataError as error:
        raise DataError(f"{path}: {error.what}", **error.slots) from None


def read_chars(path: Path) -> list[str]:
    """What index labels mean: the character of each line, from line 0; empty where a line holds none.

    Raises:
        DataError: The file cannot be read, or a line has several characters other than "blank" on line 0.
    """
    try:
        content = read_plain(path, MAX_ALPHABET_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    lines = content.removesuffix(b"\n").split(b"\n")
    try:
        table = [line.decode("utf-8-sig").strip("\r") for line in lines]
    except UnicodeDecodeError:
        # Six lines of the published file are no GBK either: they stand for nothing, as in the reference.
        table = [line.decode("gbk", "ignore").strip("\r") for line in lines]
    if table and table[0].lower() == "blank":
        table[0] = ""
    long = next((number for number, text in enumerate(table) if len(text) > 1), None)
    if long is not None:
        raise DataError(f"{path}:{long + 1} has {len(table[long])} characters", allowed="one character on each line")
    return table


def normalise_text(text: str, form: str) -> str:
    """A text in one Unicode form.

    Args:
        text: Any.
        form: none, nfc, nfkc, or half_width: full-width forms of ASCII and the wide space become the narrow ones.
    """
    if form == "half_width":
        return text.translate(_NARROW)
    if form == "none":
        return text
    return unicodedata.normalize("NFC" if form == "nfc" else "NFKC", text)


_NARROW = {**{wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}, 0x3000: 0x20}


def codes_of(text: str) -> CodeArray:
    """(L,) code points."""
    # A lone half of a surrogate pair is no character, but a label file can hold one: it is then merely unknown.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint32)


def text_of(codes: CodeArray) -> str:
    """The inverse of `codes_of`."""
    return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def show_character(character: str) -> str:
    """A character as an error shows it, even one that cannot be seen."""
    return f"{character!r} (U+{ord(character):04X})"
