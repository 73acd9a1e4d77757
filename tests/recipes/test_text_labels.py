"""Characters and classes, label files of all forms, and which lines are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from samebits.data.keyed import keys
from samebits.data.loader import Loader
from samebits.errors import DataError, SamebitsError
from samebits.recipes.text.alphabet import Alphabet, read_alphabet
from samebits.recipes.text.config import Config, DataConfig
from samebits.recipes.text.data import ground_truths
from samebits.recipes.text.files import choose, find_alphabet
from samebits.recipes.text.labels import Labels, read_labels
from samebits.recipes.text.recipe import build, dataset_info

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


def test_labels_in_gbk_are_found_out(tmp_path: Path) -> None:
    assert rows(labels_of(tmp_path / "l.txt", "a.png 你好，世界\n".encode("gbk"))) == [("a.png", "你好，世界")]


def test_what_is_neither_utf_8_nor_gbk_is_named_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"l\.txt:2 can't be decoded"):
        labels_of(tmp_path / "l.txt", b"a.png x\nb.png \xff\xff\n")


@pytest.fixture
def chars(tmp_path: Path) -> Path:
    path = tmp_path / "chars.txt"
    path.write_bytes("blank\n，\n你\n".encode("gbk") + b"\xff\n" + "好\nX\n".encode("gbk"))
    return path


def test_index_labels_mean_lines_of_the_table_and_those_without_a_character_fall_away(
    tmp_path: Path, chars: Path
) -> None:
    labels = labels_of(tmp_path / "l.txt", "a.png 2 4 1\nb.png 3 5\nc.png 2 3 2\n", chars)
    assert rows(labels) == [("a.png", "你好，"), ("b.png", "X"), ("c.png", "你你")]
    assert labels.num_gaps == 2


def test_index_labels_without_a_table_are_not_taken_for_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="index labels") as error:
        labels_of(tmp_path / "l.txt", "a.png 2 4 1\n")
    assert "data.chars" in error.value.slots["fix"]


@pytest.mark.parametrize("field", ["6", "-1", "x", "1.5"])
def test_a_number_of_no_character_is_named_by_its_line(tmp_path: Path, chars: Path, field: str) -> None:
    with pytest.raises(DataError, match=rf"l\.txt:2 has {field}, which is not the number"):
        labels_of(tmp_path / "l.txt", f"a.png 2 4\nb.png 1 {field} 2\n", chars, form="index")


def test_a_line_without_a_label_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"l\.txt:3 is not of the form path text"):
        labels_of(tmp_path / "l.txt", "a.png x\n\nb.png\n")


def test_an_empty_file_of_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no labels"):
        labels_of(tmp_path / "l.txt", "\n\n")


@pytest.mark.parametrize(
    ("form", "text"),
    [("none", "Ａ１　ｶﾞé①"), ("half_width", "A1 ｶﾞé①"), ("nfc", "Ａ１　ｶﾞé①"), ("nfkc", "A1 ガé1")],
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
    with pytest.raises(DataError) as error:
        find_alphabet(DataConfig(train=str(tmp_path), eval=str(tmp_path)))
    assert error.value.slots["fix"] == 'Run pip install "samebits[lmdb]".'
