"""Names of classes: characters that nobody sees, numbers and their order, and marks of no class."""

from __future__ import annotations

from pathlib import Path

from samebits.recipes.classify.config import Config
from samebits.recipes.classify.recipe import build
from tests.recipes.class_folders import found, touch


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
