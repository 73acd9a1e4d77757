"""Characters and classes, label files of all forms, and the lines of them that are used, with their images."""

import io
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from samebits.data.images import EncodedImage
from samebits.data.keyed import keys
from samebits.data.loader import Loader
from samebits.errors import ConfigError, DataError, SamebitsError
from samebits.recipes.text.alphabet import Alphabet, read_alphabet
from samebits.recipes.text.config import Config, DataConfig
from samebits.recipes.text.files import choose, find_alphabet
from samebits.recipes.text.images import gray, open_packed
from samebits.recipes.text.labels import Labels, read_labels
from samebits.recipes.text.recipe import build, dataset_info, ground_truths

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


def write_lines(folder: Path, texts: dict[str, str], name: str = "l.txt", size: tuple[int, int] = (60, 20)) -> None:
    (folder / "images").mkdir(exist_ok=True)
    for file in texts:
        Image.new("L", size, 128).save(folder / "images" / file)
    (folder / name).write_text("".join(f"{file}\t{text}\n" for file, text in texts.items()), encoding="utf-8")


def settings_of(folder: Path, **data: Any) -> Config:
    given = {"root": str(folder), "train": "l.txt", "eval": "l.txt", "width": 32, **data}
    return Config.model_validate({"recipe": "text", "data": given, "model": {"name": "fast", "width": 1}})


def test_an_alphabet_is_collected_from_all_labels(tmp_path: Path) -> None:
    write_lines(tmp_path, {"a.png": "cab", "b.png": "ab"})
    write_lines(tmp_path, {"c.png": "cd"}, "v.txt")
    assert find_alphabet(settings_of(tmp_path, eval="v.txt").data).characters == "abcd"


@pytest.mark.parametrize("sign", ["\u200b", "\ufeff", "\u00ad", "\x07", "\u2028", "\u3164"])
def test_an_invisible_character_does_not_become_a_class(tmp_path: Path, sign: str) -> None:
    (tmp_path / "l.txt").write_text(f"a.png\tab\nb.png\tb{sign}c\n", encoding="utf-8")
    data = DataConfig.model_validate({"train": str(tmp_path / "l.txt"), "eval": str(tmp_path / "l.txt")})
    with pytest.raises(DataError, match=rf"invisible character .*U\+{ord(sign):04X}") as error:
        find_alphabet(data)
    assert error.value.slots["where"].endswith("l.txt:2")
    assert error.value.slots["given"] == f"b<U+{ord(sign):04X}>c"
    (tmp_path / "chars.txt").write_text(f"abc{sign}", encoding="utf-8")
    named = data.model_copy(update={"alphabet": tmp_path / "chars.txt"})
    assert sign in find_alphabet(named).characters  # as the user names it


def test_joiners_and_other_spaces_are_classes_that_the_head_names(tmp_path: Path) -> None:
    write_lines(tmp_path, {"a.png": "می\u200cروم", "b.png": "x\u3000y", "c.png": "z "})
    config = settings_of(tmp_path)
    head = build(config, dataset_info(config)).describe
    assert head["alphabet"].endswith("; invisible: <U+200C> <U+3000>")
    assert head["labels"].startswith("1 of 3 begin or end with a space, such as ")
    assert head["labels"].endswith("l.txt:3")


def test_a_character_that_the_alphabet_lacks_is_named_with_file_and_line(tmp_path: Path) -> None:
    write_lines(tmp_path, {"a.png": "ab", "b.png": "a囧b", "c.png": "囧"})
    with pytest.raises(DataError, match=r"character '囧' \(U\+56E7\) is not in the alphabet") as error:
        choose(settings_of(tmp_path), Alphabet("ab"), train=True)
    assert error.value.slots["where"].endswith("l.txt:2")
    assert error.value.slots["cause"] == "2 of 3 lines have such characters"


def test_lines_with_unknown_characters_are_left_out_and_counted_where_that_is_chosen(tmp_path: Path) -> None:
    write_lines(tmp_path, {"a.png": "ab", "b.png": "a囧b", "c.png": "b"})
    chosen = choose(settings_of(tmp_path, on_unknown="skip"), Alphabet("ab"), train=True)
    assert (chosen.rows.tolist(), chosen.num_unknown) == ([0, 2], 1)
    (tmp_path / "alphabet.txt").write_text("ab")
    config = settings_of(tmp_path, on_unknown="skip", alphabet=str(tmp_path / "alphabet.txt"))
    assert (
        "1 line with characters that are not in the alphabet"
        in build(config, dataset_info(config)).describe["left out"]
    )


def test_a_text_too_long_for_its_time_steps_is_found_before_training(tmp_path: Path) -> None:
    # 32 pixels are 8 steps: 8 different characters fit, and 4 equal ones with a blank between.
    write_lines(tmp_path, {"a.png": "abcdefgh", "b.png": "aaaa", "c.png": "aaaaa", "d.png": "abcdefghi"})
    with pytest.raises(DataError, match=r"the text is too long") as error:
        choose(settings_of(tmp_path), Alphabet("abcdefghi"), train=True)
    assert error.value.slots["where"].endswith("l.txt:3")
    assert error.value.what.endswith("it needs 9 time steps")
    assert error.value.slots["cause"] == "2 of 4 lines are too long"
    chosen = choose(settings_of(tmp_path, on_too_long="skip"), Alphabet("abcdefghi"), train=True)
    assert (chosen.rows.tolist(), chosen.num_too_long) == ([0, 1], 2)


def test_repeats_at_the_border_of_two_lines_need_no_step(tmp_path: Path) -> None:
    write_lines(tmp_path, {"a.png": "abcdefgh", "b.png": "habcdefg"})
    assert len(choose(settings_of(tmp_path), Alphabet("abcdefgh"), train=True).rows) == 2


def test_a_fraction_of_the_lines_is_for_validation_evenly(tmp_path: Path) -> None:
    write_lines(tmp_path, {f"{number:02d}.png": "a" for number in range(20)})
    config = settings_of(tmp_path, eval=None, val_fraction=0.2)
    train, held_out = (choose(config, Alphabet("a"), train=train).rows.tolist() for train in (True, False))
    assert held_out == [4, 9, 14, 19]
    assert sorted(train + held_out) == list(range(20))


def test_a_picture_that_is_missing_is_named_with_all_places(tmp_path: Path) -> None:
    write_lines(tmp_path, {"a.png": "a"})
    (tmp_path / "images" / "a.png").unlink()
    with pytest.raises(DataError, match=r"the image a\.png is missing") as error:
        choose(settings_of(tmp_path), Alphabet("a"), train=True)
    assert error.value.slots["cause"].splitlines()[1:] == [str(tmp_path), str(tmp_path / "images")]


@pytest.mark.parametrize(
    ("line", "path", "text"),
    [
        ("nr 0.png ab", "nr", "0.png ab"),  # a blank in the path
        ('0.png, "ab"', "0.png,", '"ab"'),  # as ICDAR writes it
        ("0.png;ab\tb", "0.png;ab", "b"),
    ],
)
def test_a_line_that_is_divided_elsewhere_is_shown_as_it_was_read(
    tmp_path: Path, line: str, path: str, text: str
) -> None:
    write_lines(tmp_path, {"0.png": "a"})
    (tmp_path / "l.txt").write_text(line + "\n")
    with pytest.raises(DataError, match="is missing") as error:
        choose(settings_of(tmp_path), Alphabet(' ab0.png"'), train=True)
    assert error.value.slots["given"] == f"a line with the path {path!r} and the text {text!r}"
    assert "write a tab between them" in error.value.slots["fix"]


def test_missing_pictures_are_counted_and_named_before_training(tmp_path: Path) -> None:
    write_lines(tmp_path, {f"{number}.png": "a" for number in range(9)})
    for number in (3, 5, 7, 8):
        (tmp_path / "images" / f"{number}.png").unlink()
    write_lines(tmp_path, {"x.png": "a"}, "eval.txt")
    config = settings_of(tmp_path, eval="eval.txt")
    with pytest.raises(DataError, match=r"4 of 9 images of .*l\.txt are missing") as error:
        dataset_info(config)
    assert error.value.slots["given"] == "3.png\n5.png\n7.png\n…"
    assert "l.txt:4, in the folder" in error.value.slots["where"]
    with (tmp_path / "eval.txt").open("a", encoding="utf-8") as file:
        file.write("x\u200b.png\ta\n")
    sets: list[dict[str, Any]] = [{"eval": "eval.txt"}, {"eval_sets": {"night": str(tmp_path / "eval.txt")}}]
    for changed in sets:
        config = settings_of(tmp_path, **{"train": "x.txt", "eval": "x.txt", **changed})
        write_lines(tmp_path, {"x.png": "a"}, "x.txt")
        with pytest.raises(DataError, match=r"1 of 2 images of .*eval\.txt are missing") as error:
            dataset_info(config)
        assert error.value.slots["given"] == "x<U+200B>.png"


def test_missing_pictures_of_an_lmdb_set_are_named_before_training(tmp_path: Path) -> None:
    for name, encoding in (("old", "latin-1"), ("new", "utf-8")):
        with lmdb.open(str(tmp_path / name), map_size=1 << 20) as environment, environment.begin(write=True) as entries:
            entries.put(b"num-samples", b"2")
            for number, text in ((1, "é"), (2, "b")):
                entries.put(b"label-%09d" % number, text.encode(encoding))
            entries.put(b"image-000000001", b"x")
    with pytest.raises(DataError, match=r"label-000000001 of .* is not UTF-8") as error:
        dataset_info(settings_of(tmp_path, train=str(tmp_path / "old"), eval=str(tmp_path / "old")))
    assert error.value.slots["fix"] == "Create the dataset again, with labels in UTF-8."
    with pytest.raises(DataError, match=r"1 of 2 images of .* are missing") as error:
        dataset_info(settings_of(tmp_path, train=str(tmp_path / "new"), eval=str(tmp_path / "new")))
    assert error.value.slots["given"] == "image-000000002"


def test_a_damaged_picture_is_named_with_its_line(tmp_path: Path) -> None:
    write_lines(tmp_path, {"a.png": "a", "b.png": "a"})
    (tmp_path / "images" / "b.png").write_bytes(b"no picture")
    config = settings_of(tmp_path)
    samples = build(config, dataset_info(config)).train_data()
    with pytest.raises(DataError, match=r"b\.png") as error:
        samples.batch(np.array([1]), keys(0, 0, np.array([1])))
    assert error.value.slots["where"].endswith("l.txt:2")


def test_pictures_are_put_into_the_nearest_of_several_widths(tmp_path: Path) -> None:
    sizes = {"a.png": (64, 32), "b.png": (200, 32), "c.png": (100, 16), "d.png": (90, 32), "e.png": (91, 32)}
    write_lines(tmp_path, dict.fromkeys(sizes, "ab"))
    for name, size in sizes.items():
        Image.new("L", size, 99).save(tmp_path / "images" / name)
    config = settings_of(tmp_path, width=[128, 64])
    samples: Any = build(config, dataset_info(config)).train_data()
    assert samples.groups.tolist() == [0, 1, 1, 0, 1]  # 90.5 is as far from 64 as from 128
    wide = np.array([1, 2])
    assert samples.batch(wide, keys(0, 0, wide)).inputs.shape == (2, 1, 32, 128)


def test_an_lmdb_set_is_read_as_the_field_packs_it(tmp_path: Path) -> None:
    write_lines(tmp_path, {"a.png": "x", "b.png": "x"})
    with lmdb.open(str(tmp_path / "set"), map_size=1 << 20) as env, env.begin(write=True) as transaction:
        transaction.put(b"num-samples", b"2")
        for number, (file, text) in enumerate({"a.png": "hé", "b.png": "你"}.items(), start=1):
            transaction.put(b"image-%09d" % number, (tmp_path / "images" / file).read_bytes())
            transaction.put(b"label-%09d" % number, text.encode())
    config = Config.model_validate(
        {"recipe": "text", "data": {"train": str(tmp_path / "set"), "eval": str(tmp_path / "set")}}
    )
    found = dataset_info(config)
    batch = build(config, found).train_data().batch(np.array([1, 0]), keys(0, 0, np.array([1, 0])))
    assert ground_truths(batch, Alphabet(found["alphabet"])) == ["你", "hé"]
    assert batch.inputs.shape == (2, 1, 32, 160)

    # Loader workers are forked from a process that has read from the set, as its pictures' sizes were asked for.
    order = np.array([1, 0])
    loader = Loader(
        build(config, found).eval_data(), lambda: iter([(order, keys(0, 0, order))]), torch.device("cpu"), num_workers=1
    )
    try:
        assert torch.equal(loader.batch(order, keys(0, 0, order)).inputs, batch.inputs)
    finally:
        loader.close()


def test_a_folder_that_is_no_lmdb_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SamebitsError, match=r"without data\.mdb"):
        find_alphabet(DataConfig(train=str(tmp_path), eval=str(tmp_path)))


def test_without_the_package_lmdb_the_fix_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lmdb", None)
    with pytest.raises(ConfigError) as error:
        find_alphabet(DataConfig(train=str(tmp_path), eval=str(tmp_path)))
    assert error.value.slots["fix"] == 'Run pip install "samebits[lmdb]".'


PIXELS = np.random.default_rng(5).integers(0, 256, (20, 50), dtype=np.uint8)
LINE = Image.fromarray(PIXELS)


def packed(folder: Path, content: bytes) -> Path:
    with lmdb.open(str(folder), map_size=1 << 20) as env, env.begin(write=True) as transaction:
        transaction.put(b"image-000000001", content)
    return folder


def file_of(image: Image.Image, form: str, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, form, exif=exif)
    return file.getvalue()


def transparent() -> Image.Image:
    """Black everywhere: what can be seen of it is in its opacity."""
    image = Image.new("RGBA", LINE.size, "black")
    image.putalpha(LINE)
    return image


FILES = {
    "gray": file_of(LINE, "PNG"),
    "colors": file_of(Image.merge("RGB", [LINE, LINE.rotate(180), LINE]), "JPEG"),
    "transparent": file_of(transparent(), "PNG"),
    "16 bits": file_of(Image.fromarray(PIXELS.astype(np.uint16) * 257), "PNG"),
    "palette": file_of(LINE.convert("RGB").quantize(16), "PNG"),
    "CMYK": file_of(LINE.convert("CMYK"), "JPEG"),
    "upside down": file_of(LINE, "JPEG", orientation=3),
    "on its side": file_of(LINE, "JPEG", orientation=6),
    "on its side, PNG": file_of(LINE, "PNG", orientation=8),
    "turned in no known way": file_of(LINE, "JPEG", orientation=77),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_packed_picture_is_seen_as_the_same_file_is(tmp_path: Path, kind: str) -> None:
    (tmp_path / "line").write_bytes(FILES[kind])
    folder = packed(tmp_path / "set", FILES[kind])
    here, there = EncodedImage(tmp_path / "line"), open_packed(folder, 1)
    picture = gray(there)
    assert picture.std() > 10
    assert np.array_equal(picture, gray(here))
    assert here.size == there.size == picture.shape[::-1]


@pytest.mark.parametrize("kind", ["gray", "colors"])
def test_a_damaged_packed_picture_is_named(tmp_path: Path, kind: str) -> None:
    folder = packed(tmp_path / "set", FILES[kind][:-300])
    with pytest.raises(DataError, match=r"image-000000001 of .*set is damaged"):
        gray(open_packed(folder, 1))
