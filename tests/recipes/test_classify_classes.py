"""Names of classes: numbers and their order."""

from __future__ import annotations

from pathlib import Path

from tests.recipes.class_folders import found, touch


def test_numbers_are_sorted_by_value_except_as_folders(tmp_path: Path) -> None:
    names = [f"{number}/{image}.jpg" for number in range(12) for image in "ab"]
    touch(tmp_path, *names)
    (tmp_path / "list.csv").write_text("".join(f"{name},{name.split('/')[0]}\n" for name in names))
    by_value = [str(number) for number in range(12)]
    # Sorted as text, as torchvision.datasets.ImageFolder does.
    assert found(root=tmp_path, on_error="stop")["classes"] == sorted(by_value)
    assert found(root=tmp_path / "list.csv", on_error="stop")["classes"] == by_value
    assert found(root=tmp_path, on_error="stop", classes=["2", "10"])["classes"] == ["2", "10"]
