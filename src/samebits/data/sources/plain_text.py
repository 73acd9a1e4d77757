"""Text of unknown origin: its encoding, which is never guessed, and characters that no reader can see."""

import codecs
import unicodedata
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from samebits.errors import DataError

_CHUNK_BYTES = 1 << 24
# Suggested for a file that is not UTF-8: those that are usual for lists on Windows and Linux.
_USUAL = ("gb18030", "big5", "shift_jis", "cp932", "euc_jp", "euc_kr", "cp949", "cp1252", "cp1251")
_WIDE = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MAX_SHOWN = 40  # characters of a line in an error
# An East Asian line is valid UTF-8 by chance: measured as 1 of 2,500 words of three characters in GBK.
_MAX_CHANCE = 1_000

# Zero-width joiners change how Persian and Indic words are written, and the signs of Arabic numbers are visible.
_VISIBLE = frozenset(
    "\u200c\u200d\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2"
)
# letters and marks by category that show nothing
_FILLERS = frozenset("\u034f\u115f\u1160\u3164\uffa0")


def is_invisible(character: str) -> bool:
    """Return whether a character shows nothing: controls, zero-width characters and line breaks, but not spaces."""
    if character in _FILLERS:
        return True
    return (
        unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        and character not in _VISIBLE
    )


def escape_invisible(text: str) -> str:
    """Replace invisible characters, and spaces other than " ", by their code points, such as <U+200B>."""
    return "".join(
        f"<U+{ord(sign):04X}>"
        if is_invisible(sign) or sign in _VISIBLE or (sign.isspace() and sign != " ")
        else sign
        for sign in text
    )


def to_utf8(
    path: Path, content: bytes, encoding: str = "utf-8", setting: str | None = None
) -> bytes:
    """Return the text of a file as UTF-8 without a byte order mark, with line feeds as the only line ends.

    Args:
        setting: The setting that selects another encoding; None if there is none.

    Raises:
        DataError: The content is in another encoding, in two, or has NUL characters.
    """
    position = _first_failure(content, encoding)
    if position is not None:
        raise _undecodable(path, content, encoding, setting, position)
    if codecs.lookup(encoding).name != "utf-8":
        in_utf8 = _lines_in_utf8(content, encoding)
        if in_utf8:
            raise DataError(
                f"{path} is in two encodings",
                given=f"line {in_utf8[0]:,} is UTF-8, as are {len(in_utf8):,} lines in all; others are {encoding}",
                fix="Convert all lines to UTF-8.",
            )
        content = b"".join(
            piece.encode("utf-8", "surrogatepass") for piece in _pieces(content, encoding)
        )
    content = content.removeprefix(codecs.BOM_UTF8)
    if b"\r" in content:
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return content


def _pieces(content: bytes, encoding: str) -> Iterator[str]:
    """Decode in chunks: the whole text would need up to four times the memory."""
    decoder = codecs.getincrementaldecoder(encoding)()
    for start in range(0, len(content), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        yield decoder.decode(content[start:end], final=end >= len(content))


def _first_failure(content: bytes, encoding: str) -> int | None:
    """Return the position of the first byte that is not of a text; None if all are."""
    num_read = 0
    try:
        for piece_number, piece in enumerate(_pieces(content, encoding), start=1):
            if "\0" in piece:  # UTF-16 without a byte order mark, or a damaged file
                return content.index(b"\0")
            num_read = piece_number * _CHUNK_BYTES
    except UnicodeDecodeError as error:
        # The object starts with bytes that the decoder has kept from the piece before.
        return min(num_read + _CHUNK_BYTES, len(content)) - len(error.object) + error.start
    except UnicodeError:  # such as UTF-16 without a byte order mark
        return 0
    return None


def _line(content: bytes, position: int) -> int:
    """Return the number of the line at a position, from 1, for all three kinds of line ends."""
    before = content[:position]
    return before.count(b"\n") + before.count(b"\r") - before.count(b"\r\n") + 1


def _lines_in_utf8(content: bytes, encoding: str) -> list[int]:
    """Return the numbers of lines that are UTF-8 in a file of another encoding; none if they may be so by chance."""
    if "a\n".encode(encoding) != b"a\n":
        return []  # UTF-16 and UTF-32, in which a line break is not one byte
    # In two bytes for a character, two bytes are often valid UTF-8 too. Three are rarely.
    in_pairs = any(
        len(pair.decode(encoding, "replace")) == 1 for pair in (b"\xb0\xa1", b"\x88\x9f")
    )
    least = "\u0800" if in_pairs else "\x80"
    found = []
    num_others = 0
    for number, line in enumerate(content.splitlines(), start=1):
        if line.isascii():
            continue
        num_others += 1
        try:
            if max(line.decode()) >= least:
                found.append(number)
        except UnicodeDecodeError:
            pass
    return found if len(found) > num_others // _MAX_CHANCE else []


def _undecodable(
    path: Path, content: bytes, encoding: str, setting: str | None, position: int
) -> DataError:
    line = _line(content, position)
    lines = content.splitlines(keepends=True)
    start = next(
        (
            end - len(each)
            for each, end in zip(lines, accumulate(map(len, lines)), strict=True)
            if end > position
        ),
        0,
    )
    readings: dict[str, list[str]] = {}
    for name in _WIDE if b"\0" in content or content.startswith(_MARKS) else ("utf-8", *_USUAL):
        if name != encoding and _is_text(content, name):
            rows = (
                content.decode(name).splitlines()[line - 1 :]
                if name in _WIDE
                else [lines[line - 1].decode(name)]
            )
            if rows:  # bytes of wide characters may look like ends of lines
                readings.setdefault(" ".join(rows[0].split())[:_MAX_SHOWN], []).append(name)
    if readings:
        cause = "\n".join(
            f"as {' and '.join(names)}, the line reads: {text}" for text, names in readings.items()
        )
    else:
        in_utf8 = [
            number
            for number, each in enumerate(lines, start=1)
            if not each.isascii() and _first_failure(each, "utf-8") is None
        ]
        cause = "no usual encoding can decode all lines: the file is damaged, or in two encodings"
        cause += (
            f"\n{len(in_utf8):,} lines are UTF-8, such as line {in_utf8[0]:,}" if in_utf8 else ""
        )
    fix = "Save the file as UTF-8, all lines."
    if setting is not None and readings:
        names = " or ".join(found[0] for found in readings.values())
        fix = f"Save the file as UTF-8, or set {setting} to the encoding in which the line reads right: {names}."
    return DataError(
        f"{path}:{line} is not {encoding.upper() if encoding == 'utf-8' else encoding}",
        given=f"byte 0x{content[position]:02X}, byte {position - start + 1:,} of line {line:,}",
        cause=cause,
        fix=fix,
    )


def _is_text(content: bytes, encoding: str) -> bool:
    """Return whether a content could be text in an encoding: of one encoding, of characters that exist."""
    characters: set[str] = set()
    try:
        for piece in _pieces(content, encoding):
            characters.update(piece)
    except UnicodeError:
        return False
    exist = all(
        unicodedata.category(each) not in ("Cc", "Cf", "Cn", "Co")
        for each in characters - set("\t\r\n")
    )
    return exist and (encoding == "utf-8" or not _lines_in_utf8(content, encoding))
