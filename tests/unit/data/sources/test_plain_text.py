"""The encoding of untrusted text files: UTF-8 or the named one, and never a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.data.sources import plain_text
from samebits.data.sources.plain_text import escape_invisible, is_invisible, to_utf8
from samebits.errors import DataError

PATH = Path("labels.tsv")


def refused(content: bytes, encoding: str = "utf-8") -> DataError:
    with pytest.raises(DataError) as error:
        to_utf8(PATH, content, encoding, "data.encoding")
    return error.value


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "cafébar"),
        ("cp1251", "Привет мир"),
        ("shift_jis", "東京ひらがなカタカナ"),
        ("big5", "國語測驗"),
        ("euc_kr", "안녕하세요 한국"),
        ("gbk", "你好，世界"),
        ("utf-16", "plain and 你好"),
    ],
)
def test_another_encoding_is_named_by_line_and_byte_with_how_the_line_would_read(encoding: str, text: str) -> None:
    content = "\n".join(["0.jpg ascii", f"1.jpg {text}", "2.jpg ascii"]).encode(encoding)
    error = refused(content)
    line = 1 if encoding == "utf-16" else 2
    assert error.what == f"labels.tsv:{line} is not UTF-8"
    assert "byte 0x" in error.slots["given"]
    shown = "0.jpg ascii" if encoding == "utf-16" else f"1.jpg {text}"
    assert f"the line reads: {shown}" in error.slots["cause"]
    assert {"latin-1": "cp1252", "gbk": "gb18030"}.get(encoding, encoding) in error.slots["fix"]
    assert to_utf8(PATH, content, encoding).decode().split("\n")[1] == f"1.jpg {text}"


def test_the_first_byte_that_fails_is_found_behind_a_split_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "_CHUNK_BYTES", 4)
    content = "aé你好\r\nb好".encode() + b"\xe4\xbdx"
    assert refused(content).slots["given"] == "byte 0xE4, byte 5 of line 2"
    assert refused("一二\n三".encode("gbk") + b"\xff", "gbk").slots["given"] == "byte 0xFF, byte 3 of line 2"
    assert to_utf8(PATH, "你好\r世界\r\n".encode("utf-16"), "utf-16").decode() == "你好\n世界\n"


@pytest.mark.parametrize(
    ("encoding", "texts"),
    [
        ("gbk", ["京A1", "沪B2"]),
        ("cp1252", ["café", "Größe"]),
        ("shift_jis", ["東京", "大阪"]),
        ("cp1251", ["Привет", "мир"]),
    ],
)
def test_two_encodings_in_one_file_are_refused_with_any_setting(encoding: str, texts: list[str]) -> None:
    content = "\n".join(texts * 10).encode(encoding) + b"\n" + "\n".join(texts * 10).encode()
    error = refused(content)
    assert "no usual encoding can decode all lines" in error.slots["cause"]
    assert "20 lines are UTF-8, such as line 21" in error.slots["cause"]
    assert "data.encoding" not in error.slots["fix"]
    error = refused(content, encoding)
    assert error.what.endswith("is in two encodings")
    assert "line 21 is UTF-8" in error.slots["given"]


def test_words_of_one_chinese_character_are_not_taken_for_utf_8_by_chance() -> None:
    text = "".join(f"{n}.jpg\t{sign}\n" for n, sign in enumerate("模摹陌南茂"))  # in GBK, bytes of UTF-8 too
    assert max(map(len, text.encode("gbk").split(b"\t"))) > 0
    assert to_utf8(PATH, text.encode("gbk"), "gbk").decode() == text


def test_a_file_in_utf_8_read_as_another_encoding_is_told_apart() -> None:
    content = "a 你好\nb 世\n".encode()
    for encoding in ("gb18030", "cp1251"):
        error = refused(content, encoding)
        assert "two encodings" in error.what or "utf-8" in error.slots["fix"], error


def test_utf_16_without_a_mark_is_refused_for_its_nul_characters() -> None:
    error = refused("a.jpg\tx\n".encode("utf-16-le"))
    assert error.what == "labels.tsv:1 is not UTF-8"
    assert error.slots["given"] == "byte 0x00, byte 2 of line 1"
    assert "reads right: utf-16-le." in error.slots["fix"]


def test_invisible_characters_are_shown_by_their_code_points() -> None:
    assert escape_invisible("tulips\u200b\xa0 \x00") == "tulips<U+200B><U+00A0> <U+0000>"
    assert not any(map(is_invisible, "aé你 \xa0\u200d\u0301\u06dd"))


@pytest.mark.parametrize("wide", ["ਊਊਊਊa\u30ff", "\u0a0a\u0a0d\u0d0aa\u30ff\u30ff", "ਊ" * 300 + "a,\u30ff\n"])
def test_wide_characters_may_have_the_bytes_of_ends_of_lines(tmp_path: Path, wide: str) -> None:
    path = tmp_path / "list.csv"
    path.write_bytes(wide.encode("utf-16-le"))
    with pytest.raises(DataError, match=r"list\.csv:\d+ is not UTF-8"):
        to_utf8(path, path.read_bytes())
