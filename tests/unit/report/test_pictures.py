from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.report.pictures import draw_confusion, draw_sheet


def _colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as image:
        return {colour for _, colour in image.getcolors(1 << 20) or []}


def test_a_confusion_matrix_is_blue_where_right_and_red_where_wrong(tmp_path: Path) -> None:
    draw_confusion([[10, 0], [5, 5]], ["cat", "dog"], tmp_path / "pictures" / "confusion.png")
    colours = _colours(tmp_path / "pictures" / "confusion.png")
    assert (33, 102, 172) in colours
    assert (178, 24, 43) in colours


def test_a_confusion_matrix_without_mistakes_has_no_red(tmp_path: Path) -> None:
    draw_confusion([[10, 0, 0], [0, 0, 0], [0, 0, 3]], ["a", "b", "a long name of a class"], tmp_path / "c.png")
    assert (178, 24, 43) not in _colours(tmp_path / "c.png")


def test_a_sheet_shows_small_grey_and_large_coloured_samples(tmp_path: Path) -> None:
    grey = np.full((8, 8), 77, np.uint8)
    coloured = np.full((300, 200, 3), (200, 10, 10), np.uint8)
    draw_sheet("worst", [grey, coloured], ["7 taken for 1", "cat"], tmp_path / "worst.png")
    colours = _colours(tmp_path / "worst.png")
    assert (77, 77, 77) in colours
    assert (200, 10, 10) in colours


def test_a_sheet_without_samples_can_be_drawn(tmp_path: Path) -> None:
    draw_sheet("worst", [], [], tmp_path / "worst.png")
    assert (tmp_path / "worst.png").exists()
