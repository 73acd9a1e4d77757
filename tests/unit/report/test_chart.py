"""Charts by matplotlib: every line on them, in any script, on a light background whatever the current folder holds."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from samebits.errors import CheckpointError
from samebits.report.chart import draw_curves
from samebits.report.pictures import font_path_for

BLUE, ORANGE, GREEN = (0, 114, 178), (213, 94, 0), (0, 158, 115)
TRAIN = [{"epoch": step / 20, "loss": 2 * math.exp(-step / 40)} for step in range(1, 101)]
EVALUATIONS = [{"epoch": epoch, "loss": 2.0 / epoch, "top1": 1 - 0.5 / epoch} for epoch in range(1, 6)]


def _pixels(path: Path) -> npt.NDArray[np.int64]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(np.int64)


def _count(path: Path, color: tuple[int, int, int]) -> int:
    return int((np.abs(_pixels(path) - color).sum(axis=2) < 30).sum())


def _draw_curves(path: Path, *, name: str = "digits", **changed: Any) -> None:
    given = {"train": TRAIN, "evaluations": EVALUATIONS, **changed}
    draw_curves(given["train"], given["evaluations"], path, monitor=("top1", "max"), name=name)


def test_loss_curves_show_training_validation_and_the_best_evaluation(tmp_path: Path) -> None:
    _draw_curves(tmp_path / "curves.png")
    for color in (BLUE, ORANGE, GREEN):
        assert _count(tmp_path / "curves.png", color) > 50
    _draw_curves(tmp_path / "untrained.png", train=[])
    assert _count(tmp_path / "untrained.png", BLUE) == 0


@pytest.mark.parametrize(
    "evaluations",
    [
        [],
        [{"epoch": 1, "top1": 0.0}],
        [{"epoch": 1, "loss": None, "top1": None}, {"epoch": 2, "loss": -1.0, "top1": 0.5}],
        [{"epoch": 1, "loss": 0.0, "top1": 1.0}],
    ],
    ids=["none", "no loss", "not finite", "zero"],
)
def test_loss_curves_of_any_records_are_drawn(evaluations: list[dict[str, Any]], tmp_path: Path) -> None:
    _draw_curves(tmp_path / "curves.png", evaluations=evaluations)
    assert (tmp_path / "curves.png").is_file()


def test_loss_curves_of_a_long_run_are_thinned(tmp_path: Path) -> None:
    many = [{"epoch": step / 100, "loss": 1.0} for step in range(1, 50_001)]
    _draw_curves(tmp_path / "curves.png", train=many)
    assert _count(tmp_path / "curves.png", BLUE) > 100


def test_names_in_chinese_are_drawn_and_not_as_boxes(tmp_path: Path) -> None:
    if font_path_for("雏菊玫瑰") is None:
        pytest.skip("no font of this machine has Chinese characters")
    for name in ("雏菊", "玫瑰"):
        _draw_curves(tmp_path / f"{name}.png", name=name)
    # A font that lacks them draws the same box for each.
    first, second = (_pixels(tmp_path / f"{name}.png") for name in ("雏菊", "玫瑰"))
    assert (first != second).any()


@pytest.mark.full
def test_the_settings_of_matplotlib_in_the_current_folder_change_no_chart(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("figure.facecolor: black\ntext.usetex: True\n")
    code = (
        "import sys; from pathlib import Path; import samebits.cli.main, samebits.recipes.results;"
        "from samebits.report.chart import draw_curves;"
        "assert 'matplotlib' not in sys.modules, 'charts are imported with light commands';"
        "draw_curves([], [], Path('c.png'), monitor=('top1', 'max'), name='t')"
    )
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True, timeout=300)
    assert _pixels(tmp_path / "c.png")[0, 0].tolist() == [255, 255, 255]


def test_a_chart_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "chart.png").mkdir()
    with pytest.raises(CheckpointError, match=r"chart\.png"):
        _draw_curves(tmp_path / "chart.png")
