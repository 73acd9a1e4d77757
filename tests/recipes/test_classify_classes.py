"""Names of classes: characters that nobody sees, numbers and their order, and marks of no class."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.errors import DataError
from samebits.recipes.classify.config import Config
from samebits.recipes.classify.listing import read_csv
from samebits.recipes.classify.recipe import build
from samebits.recipes.classify.rows import list_folder
from tests.recipes.class_folders import found, touch


@pytest.mark.parametrize("name", ["tulips\u200b", "tul\xadips", "\ufefftulips", "tulips\x00"])
def test_a_class_with_an_invisible_character_is_refused(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "1.jpg", "2.jpg")
    (tmp_path / "list.csv").write_text(f"path,label\n1.jpg,tulips\n2.jpg,{name}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"invisible character|is not UTF-8"):
        read_csv(tmp_path / "list.csv")


@pytest.mark.parametrize(("one", "other"), [("é", "e\u0301"), ("red rose", "red\xa0rose"), ("7", "07")])
def test_classes_that_look_the_same_are_refused(tmp_path: Path, one: str, other: str) -> None:
    touch(tmp_path, f"folders/{one}/1.jpg", f"folders/{other}/1.jpg", "1.jpg", "2.jpg")
    with pytest.raises(DataError, match="look the same"):
        list_folder(tmp_path / "folders", "data.root")
    (tmp_path / "list.csv").write_text(f"1.jpg,{one}\n2.jpg,{other}\n", encoding="utf-8")
    with pytest.raises(DataError, match="look the same") as error:
        read_csv(tmp_path / "list.csv")
    assert f"{one!a} and {other!a}" in error.value.slots["given"]


def test_numbers_are_sorted_by_value_except_as_folders_and_the_head_shows_the_order(tmp_path: Path) -> None:
    names = [f"{number}/{image}.jpg" for number in range(12) for image in "ab"]
    touch(tmp_path, *names)
    (tmp_path / "list.csv").write_text("".join(f"{name},{name.split('/')[0]}\n" for name in names))
    by_value = [str(number) for number in range(12)]
    # Sorted as text, as torchvision.datasets.ImageFolder does.
    for root, classes, way in ((tmp_path, sorted(by_value), "as text"), (tmp_path / "list.csv", by_value, "by value")):
        info = found(root=root, on_error="stop")
        assert info["classes"] == classes
        config = Config.model_validate({"recipe": "classify", "data": {"root": root}})
        row = build(config, info).describe["classes"]
        assert row.startswith(", ".join(classes)), row
        assert f"(sorted {way}" in row
    assert found(root=tmp_path, on_error="stop", classes=["2", "10"])["classes"] == ["2", "10"]
    cards = [f"{card}/{image}.jpg" for card in ("2", "10", "ace") for image in "ab"]
    touch(tmp_path / "cards", *cards)
    config = Config.model_validate({"recipe": "classify", "data": {"root": tmp_path / "cards"}})
    row = build(config, found(root=tmp_path / "cards", on_error="stop")).describe["classes"]
    assert row == "2 whole numbers, such as 10, and 1 names, such as ace"


@pytest.mark.parametrize("mark", ["-1", "nan", "NULL"])
def test_a_class_that_marks_images_without_one_is_refused_unless_it_is_listed(tmp_path: Path, mark: str) -> None:
    touch(tmp_path, *(f"{name}.jpg" for name in "abcdef"))
    (tmp_path / "list.csv").write_text(
        "".join(f"{name}.jpg,{label}\n" for name, label in zip("abcdef", [mark, "x", "y"] * 2, strict=True))
    )
    with pytest.raises(DataError, match=rf"class {mark} in .* looks like the mark of images without a class") as error:
        found(root=tmp_path / "list.csv", on_error="stop")
    assert error.value.slots["given"] == "2 images"
    for classes in (["x", "y"], ["y", mark]):
        assert found(root=tmp_path / "list.csv", on_error="stop", classes=classes)["classes"] == classes
