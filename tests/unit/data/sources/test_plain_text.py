"""The encoding of untrusted text files: UTF-8 or the named one, and never a guess."""

from pathlib import Path

import pytest

from samebits.data.sources import plain_text
from samebits.data.sources.plain_text import escape_invisible, is_invisible, to_utf8
from samebits.errors import DataError

PATH = Path("labels.tsv")


def refused(content: bytes) -> DataError:
    with pytest.raises(DataError) as error:
        to_utf8(PATH, content)
    return error.value


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "cafébar"),
        ("cp1251", "Привет мир"),
        ("shift_jis", "東京ひらがなカタカナ"),
        ("big5", "國語測驗"),
        ("euc-kr", "안녕하세요 한국"),
        ("gbk", "你好，世界"),
    ],
)
def test_another_encoding_is_named_by_line_and_byte_with_how_the_line_would_read(encoding: str, text: str) -> None:
    error = refused("\n".join(["0.jpg ascii", f"1.jpg {text}", "2.jpg ascii"]).encode(encoding))
    assert error.what == "labels.tsv:2 is not UTF-8"
    assert "byte 0x" in error.slots["given"]
    assert f"the line reads: 1.jpg {text}" in error.slots["cause"]
    name = {"latin-1": "cp1252", "gbk": "gb18030"}.get(encoding, encoding)
    assert f"iconv -f {name} -t UTF-8 labels.tsv > NEW" in error.slots["fix"]


def test_the_first_byte_that_fails_is_found_behind_a_split_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "_CHUNK_BYTES", 4)
    content = "aé你好\r\nb好".encode() + b"\xe4\xbdx"
    assert refused(content).slots["given"] == "byte 0xE4, byte 5 of line 2"
    assert refused("你好".encode() + b"\xe4\xbd").slots["given"] == "byte 0xE4, byte 7 of line 1"
    assert to_utf8(PATH, "\ufeff你好\r世界\r\n".encode()).decode() == "你好\n世界\n"


@pytest.mark.parametrize(
    ("encoding", "texts"),
    [
        ("gbk", ["京A1", "沪B2"]),
        ("cp1252", ["café", "Größe"]),
        ("shift_jis", ["東京", "大阪"]),
        ("cp1251", ["Привет", "мир"]),
    ],
)
def test_two_encodings_in_one_file_are_named(encoding: str, texts: list[str]) -> None:
    error = refused("\n".join(texts * 10).encode(encoding) + b"\n" + "\n".join(texts * 10).encode())
    assert "in two encodings" in error.slots["cause"]
    assert "20 lines are UTF-8, such as line 21" in error.slots["cause"]
    assert error.slots["fix"] == "Save the file as UTF-8, all lines."


def test_a_line_that_no_usual_encoding_can_decode_is_damaged() -> None:
    assert "the file is damaged" in refused(b"a.jpg \xff\xff\x01\x81\n").slots["cause"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_wide_characters_are_named_whether_or_not_there_is_a_mark(encoding: str) -> None:
    error = refused("a.jpg\tx\n".encode(encoding))
    assert error.what == "labels.tsv:1 is not UTF-8"
    assert error.slots["cause"] == "the file is UTF-16 or UTF-32, or it is no text"
    assert refused("你好".encode("utf-16")).slots["given"].startswith("byte 0xFF, byte 1 of line 1")


def test_invisible_characters_are_shown_by_their_code_points() -> None:
    assert escape_invisible("tulips\u200b\xa0 \x00") == "tulips<U+200B><U+00A0> <U+0000>"
    assert not any(map(is_invisible, "aé你 \xa0\u200d\u0301\u06dd"))


@pytest.mark.parametrize("wide", ["ਊਊਊਊa\u30ff", "\u0a0a\u0a0d\u0d0aa\u30ff\u30ff", "ਊ" * 300 + "a,\u30ff\n"])
def test_wide_characters_may_have_the_bytes_of_ends_of_lines(tmp_path: Path, wide: str) -> None:
    path = tmp_path / "list.csv"
    path.write_bytes(wide.encode("utf-16-le"))
    with pytest.raises(DataError, match=r"list\.csv:\d+ is not UTF-8"):
        to_utf8(path, path.read_bytes())
