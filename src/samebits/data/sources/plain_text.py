"""Text of unknown origin: UTF-8, which is checked, and characters that no reader can see."""

import codecs
import shlex
import unicodedata
from contextlib import suppress
from pathlib import Path

from samebits.errors import DataError

_CHUNK_BYTES = 1 << 24
# Suggested for a file that is not UTF-8, by names that Python and iconv have: usual for lists on Windows and Linux.
_USUAL = ("gb18030", "big5", "shift_jis", "euc-jp", "euc-kr", "cp949", "cp1252", "cp1251")
_MAX_SHOWN = 40  # characters of a line in an error

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


def to_utf8(path: Path, content: bytes) -> bytes:
    """Return the UTF-8 text of a file without a byte order mark, with line feeds as the only line ends.

    Raises:
        DataError: The content is in another encoding, or has NUL characters.
    """
    is_wide = b"\0" in content or content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not is_wide:
        content = content.removeprefix(codecs.BOM_UTF8)
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    position = content.find(b"\0") if is_wide else _first_failure(content)
    if position is None:
        return content
    position = max(position, 0)  # UTF-16 of Chinese alone has no NUL
    line = content.count(b"\n", 0, position) + 1
    start = content.rfind(b"\n", 0, position) + 1
    cause = "the file is UTF-16 or UTF-32, or it is no text"
    fix = "Save the file as UTF-8, all lines."
    if not is_wide:
        cause, commands = _how_it_reads(path, content.split(b"\n"), line)
        if commands:
            fix = f"Save the file as UTF-8, from the encoding in which the line reads right:\n{commands}"
    raise DataError(
        f"{path}:{line} is not UTF-8",
        given=f"byte 0x{content[position]:02X}, byte {position - start + 1:,} of line {line:,}",
        cause=cause,
        fix=fix,
    )


def _first_failure(content: bytes) -> int | None:
    """Return the position of the first byte that is not UTF-8; None if all are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    # In chunks: the whole text would need up to four times the memory.
    for start in range(0, len(content), _CHUNK_BYTES):
        num_kept = len(decoder.getstate()[0])  # of a character that the chunk before has begun
        end = start + _CHUNK_BYTES
        try:
            decoder.decode(content[start:end], final=end >= len(content))
        except UnicodeDecodeError as error:
            return start - num_kept + error.start
    return None


def _how_it_reads(path: Path, lines: list[bytes], number: int) -> tuple[str, str]:
    """Return how a line that is not UTF-8 reads in usual encodings, none of which is guessed; and commands for them."""
    in_utf8 = [
        each
        for each, line in enumerate(lines, start=1)
        if not line.isascii() and _first_failure(line) is None
    ]
    if in_utf8:
        some = f"{len(in_utf8):,} lines are UTF-8, such as line {in_utf8[0]:,}"
        return f"the file is damaged, or in two encodings\n{some}", ""
    readings: dict[str, list[str]] = {}
    for name in _USUAL:
        with suppress(UnicodeDecodeError):
            text = " ".join(lines[number - 1].decode(name).split())
            if text.isprintable():
                readings.setdefault(text[:_MAX_SHOWN], []).append(name)
    if not readings:
        return "no usual encoding can decode the line: the file is damaged", ""
    quoted = shlex.quote(str(path))
    return (
        "\n".join(
            f"as {' and '.join(names)}, the line reads: {text}" for text, names in readings.items()
        ),
        "\n".join(f"  iconv -f {names[0]} -t UTF-8 {quoted} > NEW" for names in readings.values()),
    )
