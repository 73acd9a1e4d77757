"""Characters and classes: the blank is class 0, the first character of the alphabet is class 1.

Whole label files are encoded and whole batches are decoded at once, as arrays of code points.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samebits.data.keyed import IntArray
from samebits.data.sources.plain_text import escape_invisible, to_utf8
from samebits.errors import DataError
from samebits.recipes.listing import read_list

CHARS_NAME = "char_std_5990.txt"  # the table of the published index labels
BLANK = 0
UNKNOWN = -1
MAX_CHARACTERS = (
    100_000  # more than Unicode has Han characters; the network's last layer has a row for each
)
MAX_ALPHABET_BYTES = 1 << 24  # Unicode has a million characters of up to four bytes

CodeArray = npt.NDArray[np.uint32]


class Alphabet:
    """The characters that a network can recognize, in the order of its classes.

    Args:
        characters: One code point each, without duplicates.

    Raises:
        DataError: There are no characters, too many, or duplicates.
    """

    def __init__(self, characters: str) -> None:
        if not characters:
            raise DataError(
                "the alphabet is empty",
                allowed="at least one character",
                fix="Add characters to labels or data.alphabet.",
            )
        if len(characters) > MAX_CHARACTERS:
            raise DataError(
                f"the alphabet has {len(characters):,} characters",
                allowed=f"at most {MAX_CHARACTERS:,}",
                fix="Check that the file contains characters and not text.",
            )
        [(character, count)] = Counter(characters).most_common(1)
        if count > 1:
            first = characters.index(character)
            second = characters.index(character, first + 1)
            raise DataError(
                f"the alphabet has {show_character(character)} twice",
                where=f"characters {first + 1:,} and {second + 1:,}",
                fix="Delete one of them.",
            )
        self.characters = characters
        self._codes = codes_of(characters)
        self._sorted = np.argsort(self._codes, kind="stable")

    def __len__(self) -> int:
        return len(self.characters)

    @property
    def num_classes(self) -> int:
        """The number of characters, plus one for the blank."""
        return len(self) + 1

    def encode(self, text: str) -> IntArray:
        """Encode a text as (L,) classes; UNKNOWN for characters that are not in the alphabet."""
        return self.encode_codes(codes_of(text))

    def encode_codes(self, codes: CodeArray) -> IntArray:
        """Encode (L,) code points as (L,) classes."""
        ordered = self._codes[self._sorted]
        indices = np.minimum(np.searchsorted(ordered, codes), len(ordered) - 1)
        return np.where(ordered[indices] == codes, self._sorted[indices] + 1, UNKNOWN).astype(
            np.int64
        )

    def decode(self, classes: IntArray) -> str:
        """Decode (L,) classes without blanks: the inverse of `encode`."""
        return text_of(self._codes[classes - 1])

    def decode_paths(self, paths: IntArray) -> list[str]:
        """Decode CTC paths: merge equal neighbors, then remove blanks.

        Args:
            paths: (N, T) classes, one per time step.

        Returns:
            N texts.
        """
        before = np.empty_like(paths)
        before[:, :1], before[:, 1:] = BLANK, paths[:, :-1]
        counts = (paths != BLANK) & (paths != before)
        together = self.decode(paths[counts])
        ends = np.cumsum(counts.sum(axis=1)).tolist()
        return [together[start:end] for start, end in pairwise([0, *ends])]


def read_alphabet(path: Path) -> Alphabet:
    """Read an alphabet from a UTF-8 file: all characters on one line, or one per line.

    Raises:
        DataError: The file can't be read, or has another form.
    """
    content = read_list(path, MAX_ALPHABET_BYTES, "Set data.alphabet to a readable file.")
    lines = [line for line in to_utf8(path, content).decode().split("\n") if line]
    if len(lines) > 1:
        _check_single(path, lines, "all characters on one line, or one per line")
    try:
        return Alphabet("".join(lines))
    except DataError as error:
        raise error.with_slots(f"{path}: {error.what}") from None


def read_chars(path: Path) -> list[str]:
    """Read the characters of index labels, one per line, from line 0.

    Args:
        path: The file. One that is called char_std_5990.txt may be in GBK, as it was published.

    Returns:
        The characters by line number; empty for a line without a character.

    Raises:
        DataError: The file can't be read or decoded, or a line has several characters other than "blank" on line 0.
    """
    content = read_list(path, MAX_ALPHABET_BYTES, "Set data.chars to a readable file.")
    try:
        table = to_utf8(path, content).decode().removesuffix("\n").split("\n")
    except DataError:
        if path.name != CHARS_NAME:
            raise
        # Six lines of the published file are not valid GBK either: they have no character, as in the reference.
        table = [
            line.decode("gbk", "ignore").strip("\r")
            for line in content.removesuffix(b"\n").split(b"\n")
        ]
    if table and table[0].lower() == "blank":
        table[0] = ""
    _check_single(path, table, "one character per line")
    return table


def _check_single(path: Path, lines: Sequence[str], allowed: str) -> None:
    """Check that no line has several characters."""
    for number, line in enumerate(lines, start=1):
        if len(line) > 1:
            raise DataError(
                f"{path}:{number} has {len(line)} characters",
                allowed=allowed,
                fix="Remove the other characters.",
            )


def normalize_text(text: str, form: str) -> str:
    """Convert a text to a Unicode normalization form.

    Args:
        form: none, nfc, nfkc, or half_width, which converts only full-width ASCII and the ideographic space.
    """
    if form == "half_width":
        return text.translate(_NARROW)
    if form == "none":
        return text
    return unicodedata.normalize("NFC" if form == "nfc" else "NFKC", text)


_NARROW = {**{wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}, 0x3000: 0x20}


def codes_of(text: str) -> CodeArray:
    """Convert a text to (L,) code points."""
    # A label file can contain a lone surrogate, which is not a character. It is then unknown, without an error.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint32)


def text_of(codes: CodeArray) -> str:
    """Convert (L,) code points to a text: the inverse of `codes_of`."""
    return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def show_character(character: str) -> str:
    """Format a character for an error message, with its code point, and its name if it is invisible."""
    name = (
        f" {unicodedata.name(character, '')}".rstrip()
        if escape_invisible(character) != character
        else ""
    )
    return f"{character!r} (U+{ord(character):04X}{name})"
