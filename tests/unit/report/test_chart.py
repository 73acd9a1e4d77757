"""A line chart: round numbers beside it, and every line on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lockstep.report.chart import draw_lines, ticks


@given(st.floats(1e-6, 1e9))
def test_ticks_are_even_and_reach_just_over_the_largest_value(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0
    assert found[-1] >= most * (1 - 1e-9)
    assert found[-2] < most
    assert 3 <= len(found) <= 9
    assert np.allclose(np.diff(found), found[1])


def test_all_lines_are_on_the_chart_in_colours_of_their_own(tmp_path: Path) -> None:
    lines = {"exact": [(1, 100.0), (2, 190.0)], "ddp": [(1, 110.0), (2, 180.0)], "(ideal)": [(1, 100.0), (2, 200.0)]}
    draw_lines(lines, tmp_path / "new" / "chart.png", title="digits", x_name="processes", y_name="samples a second")
    picture = np.asarray(Image.open(tmp_path / "new" / "chart.png").convert("RGB")).astype(int)
    for colour in ((0, 114, 178), (213, 94, 0)):
        assert (np.abs(picture - colour).sum(axis=2) < 30).sum() > 100


def test_a_chart_of_nothing_but_zeros_is_drawn(tmp_path: Path) -> None:
    draw_lines({"a": [(1, 0.0), (2, 0.0)]}, tmp_path / "chart.png", title="t", x_name="x", y_name="y")
    assert (tmp_path / "chart.png").is_file()
