import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from samebits.report.pictures import _in_lines, draw_confusion, draw_sheet, font_for, font_path_for


def _colors(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as image:
        return {color for _, color in image.getcolors(1 << 20) or []}


def test_a_confusion_matrix_is_blue_where_right_and_red_where_wrong(tmp_path: Path) -> None:
    draw_confusion([[10, 0], [5, 5]], ["cat", "dog"], tmp_path / "pictures" / "confusion.png")
    colors = _colors(tmp_path / "pictures" / "confusion.png")
    assert (33, 102, 172) in colors
    assert (178, 24, 43) in colors


def test_a_confusion_matrix_without_mistakes_has_no_red(tmp_path: Path) -> None:
    draw_confusion([[10, 0, 0], [0, 0, 0], [0, 0, 3]], ["a", "b", "a long name of a class"], tmp_path / "c.png")
    assert (178, 24, 43) not in _colors(tmp_path / "c.png")


def test_a_sheet_shows_small_gray_and_large_colored_samples(tmp_path: Path) -> None:
    gray = np.full((8, 8), 77, np.uint8)
    colored = np.full((300, 200, 3), (200, 10, 10), np.uint8)
    draw_sheet("worst", [gray, colored], ["prediction 1, ground truth 7", "cat"], tmp_path / "worst.png")
    colors = _colors(tmp_path / "worst.png")
    assert (77, 77, 77) in colors
    assert (200, 10, 10) in colors


def test_a_sheet_without_samples_can_be_drawn(tmp_path: Path) -> None:
    draw_sheet("worst", [], [], tmp_path / "worst.png")
    assert (tmp_path / "worst.png").exists()


def _has_ink(path: Path, box: tuple[int, int, int, int]) -> bool:
    with Image.open(path) as image:
        return image.crop(box).getcolors() != [((box[2] - box[0]) * (box[3] - box[1]), (255, 255, 255))]


@pytest.mark.parametrize("caption", ["crosses, not triangles", "a_name_without_a_space_in_it, not_another_one"])
def test_a_caption_stays_below_its_own_sample(caption: str, tmp_path: Path) -> None:
    tiles = [np.full((8, 8), 77, np.uint8)] * 2
    draw_sheet("worst", tiles, [caption] * 2, tmp_path / "worst.png")
    tile_px, gap_px, margin_px = 112, 12, 24
    middle = margin_px + tile_px + gap_px // 2
    assert not _has_ink(tmp_path / "worst.png", (middle - 1, 60, middle + 1, 215))
    assert _has_ink(tmp_path / "worst.png", (margin_px, 168, margin_px + tile_px, 215))


@pytest.mark.parametrize(
    "names",
    [
        ("golden_retriever_of_the_east", "german_shepherd_of_the_west"),
        ("a name of several words that are long", "another one of them, which is longer"),
        ("x" * 200, "金毛寻回犬" * 20),
    ],
)
def test_the_ground_truth_is_shown_below_a_long_prediction(names: tuple[str, str]) -> None:
    font = font_for("".join(names), 16)
    lines = _in_lines(f"prediction {names[0]},\nground truth {names[1]}", font, 120)
    assert all(font.getlength(line) <= 120 for line in lines)
    assert len(lines) <= 6
    start = next(index for index, line in enumerate(lines) if line.startswith("ground"))
    assert "".join(lines[start:]).replace(" ", "").startswith(f"groundtruth{names[1].replace(' ', '')}"[:16])


def test_short_captions_keep_their_lines() -> None:
    font = font_for("a", 16)
    assert _in_lines("3, loss 2.10", font, 120) == ["3, loss 2.10"]
    assert _in_lines("prediction 3, ground truth 5", font, 120) == ["prediction 3,", "ground truth 5"]
    assert _in_lines("prediction cat,\nground truth dog", font, 400) == ["prediction cat,", "ground truth dog"]


def test_a_sheet_fits_tiles_into_a_size_of_their_own(tmp_path: Path) -> None:
    line = np.full((32, 160), 77, np.uint8)
    draw_sheet("lines", [line] * 4, ["a", "b", "c", "雏菊"], tmp_path / "s.png", num_columns=2, tile_px=(320, 64))
    with Image.open(tmp_path / "s.png") as image:
        assert image.width == 2 * 24 + 2 * 320 + 12
        assert image.crop((24, 60, 344, 110)).getcolors() == [(320 * 50, (77, 77, 77))]


def test_a_long_name_of_a_class_is_whole_above_its_column_too(tmp_path: Path) -> None:
    counts = [[1, 0], [0, 1]]
    for name in ("rose", "chrysanthemum"):
        draw_confusion(counts, [name, "b"], tmp_path / f"{name}.png")
    with Image.open(tmp_path / "rose.png") as short, Image.open(tmp_path / "chrysanthemum.png") as long:
        assert long.height - short.height > 50
    draw_confusion(counts, ["x" * 500, "b"], tmp_path / "endless.png")
    with Image.open(tmp_path / "endless.png") as image:
        assert max(image.size) < 600


def test_title_and_legend_of_a_small_matrix_lie_side_by_side(tmp_path: Path) -> None:
    draw_confusion([[10, 0], [5, 5]], ["a", "b"], tmp_path / "c.png")
    with Image.open(tmp_path / "c.png") as image:
        inked = [x for x in range(image.width) if _has_ink(tmp_path / "c.png", (x, 0, x + 1, 36))]
    assert max(right - left for left, right in itertools.pairwise(inked)) > 15


def test_names_in_chinese_are_drawn_and_not_as_boxes(tmp_path: Path) -> None:
    if font_path_for("雏菊玫瑰") is None:
        pytest.skip("no font of this machine has Chinese characters")
    for name in ("雏菊", "玫瑰"):
        draw_confusion([[1, 0], [0, 1]], [name, "b"], tmp_path / f"{name}.png")
    # A font that lacks them draws the same box for each.
    assert (tmp_path / "雏菊.png").read_bytes() != (tmp_path / "玫瑰.png").read_bytes()
