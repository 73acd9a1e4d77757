"""Curves as SVG: every line on them, names of any script as text, on a light background, written whole or named."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from samebits.errors import CheckpointError
from samebits.report.chart import draw_curves

BLUE, ORANGE = "#0072b2", "#d55e00"
TRAIN = [{"kind": "train", "step": n, "epoch": n / 20, "loss": 2 * math.exp(-n / 40)} for n in range(1, 101)]
EVALUATIONS = [{"kind": "eval", "step": 20 * n, "epoch": n, "loss": 2 / n, "top1": 1 - 0.5 / n} for n in range(1, 6)]


def draw(folder: Path, train: list[Any] = TRAIN, evaluations: list[Any] = EVALUATIONS, metric: str = "top1") -> None:
    draw_curves([*train, *evaluations], folder, (metric, "max"))


def texts(path: Path) -> list[str]:
    return [text.strip() for text in ElementTree.parse(path).getroot().itertext() if text.strip()]


def lines(path: Path) -> dict[str, int]:
    """Number of points of each line, by its color."""
    found = ElementTree.parse(path).getroot().findall("{*}polyline")
    return {line.attrib["stroke"]: len(line.attrib["points"].split()) for line in found}


def test_loss_curves_show_training_validation_and_the_best_evaluation(tmp_path: Path) -> None:
    draw(tmp_path)
    assert lines(tmp_path / "loss.svg") == {BLUE: 100, ORANGE: 5}
    assert {"training", "validation", "epoch"} <= set(texts(tmp_path / "loss.svg"))
    assert "Validation top-1, best 90.00%" in texts(tmp_path / "metric.svg")
    draw(tmp_path / "untrained", train=[])
    assert lines(tmp_path / "untrained/loss.svg") == {ORANGE: 5}


@pytest.mark.parametrize(
    ("evaluations", "names"),
    [
        ([], ["loss.svg"]),
        ([{"top1": 0.0}], ["loss.svg"]),
        ([{"loss": None, "top1": None}, {"loss": -1.0, "top1": 0.5}], ["loss.svg"]),
        ([{"loss": 0.0, "top1": 1.0}, {"loss": 0.0, "top1": 1.0}], ["loss.svg", "metric.svg"]),
        ([{"top1": 1e300}, {"top1": -1e300}], ["loss.svg", "metric.svg"]),
        ([{"top1": 10**400}, {"top1": True}, {"top1": "x"}], ["loss.svg"]),
    ],
    ids=["none", "no loss", "not finite", "zero", "largest", "no numbers"],
)
def test_loss_curves_of_any_records_are_drawn(evaluations: list[Any], names: list[str], tmp_path: Path) -> None:
    draw(tmp_path, evaluations=[{"kind": "eval", "step": n, "epoch": n, **each} for n, each in enumerate(evaluations)])
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert not re.search("nan|inf", (tmp_path / name).read_text())


def test_loss_curves_of_a_long_run_are_thinned(tmp_path: Path) -> None:
    many = [{"kind": "train", "step": step, "epoch": step / 100, "loss": 1.0} for step in range(1, 50_001)]
    draw(tmp_path, train=many)
    assert lines(tmp_path / "loss.svg")[BLUE] <= 500


def test_a_loss_that_falls_far_has_a_logarithmic_axis(tmp_path: Path) -> None:
    draw(tmp_path, train=[{**each, "loss": 10.0 ** -each["epoch"]} for each in TRAIN])
    assert "Loss, logarithmic scale" in texts(tmp_path / "loss.svg")


def test_the_metric_is_not_drawn_twice_where_it_is_the_loss(tmp_path: Path) -> None:
    draw(tmp_path, metric="loss")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.svg"]


@pytest.mark.parametrize("metric", ["雏菊", "<script>", "a\x00b", "x" * 500, "a & more"])
def test_a_name_of_a_metric_is_text_of_the_drawing(tmp_path: Path, metric: str) -> None:
    draw(tmp_path, evaluations=[{**each, metric: each["top1"]} for each in EVALUATIONS], metric=metric[:80])
    if len(metric) <= 80:
        shown = metric.replace("\x00", "\\x00")
        assert f"Validation {shown}, best 0.900" in texts(tmp_path / "metric.svg")
    kinds = {each.tag.rpartition("}")[2] for each in ElementTree.parse(tmp_path / "loss.svg").getroot().iter()}
    assert kinds == {"svg", "title", "text", "line", "path", "polyline", "rect"}


@pytest.mark.full
def test_light_commands_import_no_template_engine() -> None:
    code = (
        "import sys, samebits.cli.main, samebits.recipes.results;"
        "assert 'jinja2' not in sys.modules, 'charts are imported with light commands'"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=300)


def test_a_chart_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "loss.svg").mkdir()
    with pytest.raises(CheckpointError, match=r"loss\.svg"):
        draw(tmp_path)
