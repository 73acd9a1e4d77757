"""Characters and classes, label files of all forms, and which lines are used."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.errors import DataError
from samebits.recipes.text.alphabet import Alphabet, read_alphabet
from samebits.recipes.text.config import DataConfig
from samebits.recipes.text.labels import Labels, read_labels

alphabets = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).map(
    lambda text: Alphabet("".join(dict.fromkeys(text)))
)


@settings(max_examples=200, deadline=None)
@given(alphabet=alphabets, data=st.data())
def test_decoding_takes_back_encoding(alphabet: Alphabet, data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from(alphabet.characters), max_size=30))
    classes = alphabet.encode(text)
    assert alphabet.decode(classes) == text
    assert (classes > 0).all()
    assert (classes < alphabet.num_classes).all()


@settings(max_examples=200, deadline=None)
@given(alphabet=alphabets, text=st.text(max_size=20))
def test_what_the_alphabet_lacks_and_only_that_is_unknown(alphabet: Alphabet, text: str) -> None:
    assert [number == -1 for number in alphabet.encode(text).tolist()] == [
        character not in alphabet.characters for character in text
    ]


def test_an_alphabet_with_a_character_twice_is_refused() -> None:
    with pytest.raises(DataError, match=r"'b' \(U\+0062\) twice") as error:
        Alphabet("abcb")
    assert error.value.slots["where"] == "characters 2 and 4"


@pytest.mark.parametrize("content", ["ab你c", "ab你c\n", "a\nb\n你\nc\n", "﻿a\r\nb\r\n你\r\nc"])
def test_an_alphabet_file_has_one_line_or_one_character_a_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert read_alphabet(tmp_path / "a.txt").characters == "ab你c"


def test_an_alphabet_file_that_is_neither_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nbc\nd\n")
    with pytest.raises(DataError, match=r"a\.txt:2 has 2 characters"):
        read_alphabet(tmp_path / "a.txt")


def labels_of(path: Path, content: str | bytes, chars: Path | None = None, **config: Any) -> Labels:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    data = DataConfig.model_validate({"train": str(path), "eval": str(path), **config})
    return read_labels(path, data, chars)


def rows(labels: Labels) -> list[tuple[str, str]]:
    return [(labels.name(place), labels.text(place)) for place in range(len(labels))]


FORMS = {
    "a tab": "a.png\tone two\nsub/b.png\tü你\n",
    "a tab and columns that are not ours": "a.png\tone two\ttrain\nsub/b.png\tü你\ttest\n",
    "a space": "a.png one two\nsub/b.png ü你\n",
    "no line break at the end": "a.png one two\nsub/b.png ü你",
    "Windows line ends": "a.png\tone two\r\nsub/b.png\tü你\r\n",
    "a byte order mark": "﻿a.png\tone two\nsub/b.png\tü你\n",
    "empty lines": "\na.png one two\n\nsub/b.png ü你\n\n",
}


@pytest.mark.parametrize("content", FORMS.values(), ids=FORMS)
def test_text_labels_are_read_whole(tmp_path: Path, content: str) -> None:
    assert rows(labels_of(tmp_path / "l.txt", content)) == [("a.png", "one two"), ("sub/b.png", "ü你")]


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n"])
def test_lines_may_end_in_any_way(tmp_path: Path, end: str) -> None:
    labels = labels_of(tmp_path / "l.txt", end.join(["a.png\tone", "b.png\ttwo", "", "c.png\t三", ""]))
    assert rows(labels) == [("a.png", "one"), ("b.png", "two"), ("c.png", "三")]
    assert labels.where(2).endswith("l.txt:4")


@pytest.fixture
def chars(tmp_path: Path) -> Path:
    path = tmp_path / "char_std_5990.txt"  # a published table has this name, and may be in GBK
    path.write_bytes("blank\n，\n你\n".encode("gbk") + b"\xff\n" + "好\nX\n".encode("gbk"))
    return path


def test_index_labels_mean_lines_of_the_table_and_those_without_a_character_fall_away(
    tmp_path: Path, chars: Path
) -> None:
    labels = labels_of(tmp_path / "l.txt", "a.png 2 4 1\nb.png 3 5\nc.png 2 3 2\n", chars)
    assert rows(labels) == [("a.png", "你好，"), ("b.png", "X"), ("c.png", "你你")]
    assert labels.num_gaps == 2


def test_a_table_of_characters_by_another_name_is_not_guessed_to_be_gbk(tmp_path: Path, chars: Path) -> None:
    other = tmp_path / "chars.txt"
    other.write_bytes("blank\n，\n你\n".encode("gbk"))
    with pytest.raises(DataError, match=r"chars\.txt:2 is not UTF-8") as error:
        labels_of(tmp_path / "l.txt", "a.png 2 1\n", other, form="index")
    assert "gb18030" in error.value.slots["fix"]


@pytest.mark.parametrize("field", ["6", "-1", "x", "1.5"])
def test_a_number_of_no_character_is_named_by_its_line(tmp_path: Path, chars: Path, field: str) -> None:
    with pytest.raises(DataError, match=rf"l\.txt:2 has {field}, which is not the number"):
        labels_of(tmp_path / "l.txt", f"a.png 2 4\nb.png 1 {field} 2\n", chars, form="index")


# A file of labels, the error, and texts in its slots; {folder} is the file's.
REFUSED: dict[str, tuple[str, str | bytes, str, dict[str, str]]] = {
    "another encoding": (
        "m.txt", "a.png 安 x\r\nb.png 大\n".encode("gb18030"), r"m\.txt:1 is not UTF-8",
        {"fix": "iconv -f gb18030 -t UTF-8 {folder}/m.txt > NEW", "cause": "reads: a.png 安 x"},
    ),
    "index labels without a table": ("l.txt", "a.png 2 4 1\n", "index labels", {"fix": "data.chars"}),
    "no label": ("l.txt", "a.png x\n\nb.png\n", r"l\.txt:3 is not of the form path text", {}),
    "no labels": ("l.txt", "\n\n", "has no labels", {}),
    **{
        f"no tab in {name}: {text!r}": (
            name, text, rf"{name}:{number} has no tab",
            {"given": text.splitlines()[number - 1], "allowed": "path<TAB>text"},
        )
        for name, text, number in (
            ("l.tsv", "no tab here\n", 1), ("l.tsv", "a.png one\nb.png two\n", 1),
            ("l.txt", "a.png\tone\nb.png two\nc.png\tthree\n", 2),
        )
    },
    **{
        f"separated by {sign}": (
            "l.csv", f"a.png{sign}one\nb.png{sign}two\n", r"l\.csv:1 is not of the form path text",
            {"fix": "Write the path, a tab and the text"},
        )
        for sign in ",;|"
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_file_of_labels_is_refused_with_its_line_and_a_fix(tmp_path: Path, case: str) -> None:
    name, content, what, slots = REFUSED[case]
    with pytest.raises(DataError, match=what) as error:
        labels_of(tmp_path / name, content)
    for slot, text in slots.items():
        assert text.format(folder=tmp_path) in error.value.slots[slot]


def test_a_tab_in_one_text_does_not_make_the_file_a_table(tmp_path: Path) -> None:
    found = labels_of(tmp_path / "l.txt", "a.png x\ty\nb.png z\nc.png w\n")
    assert [found.text(row) for row in range(3)] == ["x\ty", "z", "w"]


@pytest.mark.parametrize(
    ("form", "text"), [("none", "Ａ１　ｶﾞé①"), ("half_width", "A1 ｶﾞé①"), ("nfc", "Ａ１　ｶﾞé①"), ("nfkc", "A1 ガé1")]
)
def test_unicode_forms_are_a_choice(tmp_path: Path, form: str, text: str) -> None:
    content = "a.png\tＡ１　ｶﾞe\u0301①\n" if form in ("nfc", "nfkc") else "a.png\tＡ１　ｶﾞé①\n"
    assert rows(labels_of(tmp_path / "l.txt", content, normalize=form)) == [("a.png", text)]
