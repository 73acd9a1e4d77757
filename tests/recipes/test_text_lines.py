"""Lines of text drawn from the machine's fonts, and which fonts those are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samebits.errors import DataError
from samebits.recipes.text.config import LATIN, StyleConfig
from samebits.recipes.text.fonts import Font, check_fonts, find_fonts, split_fonts
from samebits.recipes.text.lines import LineRenderer
from samebits.report.fonts import covered


def maker(fonts: list[Font], **more: Any) -> LineRenderer:
    given = {"min_length": 2, "max_length": 5, "style": StyleConfig(), "width_px": 64, **more}
    return LineRenderer(fonts=fonts, characters=LATIN, **given)


def test_a_synthetic_line_follows_from_its_key_alone(fonts: list[Font]) -> None:
    lines = maker(fonts)
    first = [lines.line(key, 1) for key in (3, 2**63 + 1, 4)]
    again = [lines.line(key, 1) for key in (4, 2**63 + 1, 3)][::-1]
    for (picture, text), (other, same) in zip(first, again, strict=True):
        assert text == same
        assert np.array_equal(picture, other)
        assert picture.shape == (32, 64)
        assert picture.dtype == np.uint8
        assert 2 <= len(text) <= 5
    assert len({text for _, text in first}) > 1


def test_a_validation_line_is_another_than_the_training_line_of_the_same_key(fonts: list[Font]) -> None:
    lines = maker(fonts)
    same = [lines.line(key, 1)[1] == lines.line(key, 2)[1] for key in range(50)]
    assert sum(same) <= 2


def test_a_line_shows_its_text(fonts: list[Font]) -> None:
    lines = maker(fonts, style=StyleConfig(noise=0, blur_px=0, inverted=0, backgrounds=False))
    for key in range(20):
        picture, _ = lines.line(key, 1)
        columns = np.flatnonzero(picture.min(axis=0) < picture.max() - 20)
        # Ink from near the left to near the right, with paper around.
        assert columns.min() < 20
        assert columns.max() > 44
        assert picture[0].std() < 40


def test_fonts_of_a_family_are_on_one_side(fonts: list[Font]) -> None:
    many = [Font(f"{family}{number}", f"family {family}", "") for family in range(10) for number in range(3)]
    seen, unseen = split_fonts(many, 0.2)
    assert len({font.family for font in unseen}) == 2
    assert not {font.family for font in seen} & {font.family for font in unseen}
    assert sorted(seen + unseen, key=str) == sorted(many, key=str)
    assert split_fonts(many, 0) == (many, [])
    assert [len(side) for side in split_fonts(many[:3], 0.2)] == [2, 1]
    assert split_fonts(many[:1], 0.2) == (many[:1], [])


def test_a_folder_without_fonts_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    with pytest.raises(DataError, match="no font has half of the 59 characters") as error:
        find_fonts(tmp_path, LATIN)
    assert "1 font files" in error.value.slots["given"]


def test_a_character_that_no_font_draws_is_named(fonts: list[Font]) -> None:
    nothing = "\U0010fffd"
    assert covered(fonts[0].path, "a" + nothing + " ") == "a"
    with pytest.raises(DataError, match=r"no font has .*U\+10FFFD"):
        find_fonts(Path(fonts[0].path).parent, LATIN + nothing)


def test_a_missing_or_changed_font_stops_a_resumed_run(tmp_path: Path, fonts: list[Font]) -> None:
    path = tmp_path / "a.ttf"
    path.write_bytes(Path(fonts[0].path).read_bytes())
    (font,) = find_fonts(tmp_path, "ab")
    check_fonts([font])
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match="has changed since the start of the run"):
        check_fonts([font])
    path.unlink()
    with pytest.raises(DataError, match="can't be read"):
        check_fonts([font])
