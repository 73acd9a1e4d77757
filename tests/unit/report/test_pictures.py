"""Pictures, curves and figures of a run."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from samebits.errors import CheckpointError
from samebits.report.chart import draw_curves
from samebits.report.format import block, clock, duration, metric_name, metric_value, metric_width
from samebits.report.pictures import _in_lines, draw_confusion, draw_sheet, font_for, font_path_for
from samebits.report.speed import Rate


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


BLUE, ORANGE = "#0072b2", "#d55e00"
TRAIN = [{"kind": "train", "step": n, "epoch": n / 20, "loss": 2 * math.exp(-n / 40)} for n in range(1, 101)]
EVALUATIONS = [{"kind": "eval", "step": 20 * n, "epoch": n, "loss": 2 / n, "top1": 1 - 0.5 / n} for n in range(1, 6)]


def draw(folder: Path, train: list[Any] = TRAIN, evaluations: list[Any] = EVALUATIONS, metric: str = "top1") -> None:
    draw_curves([*train, *evaluations], folder, metric, best=0.9)


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


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.21, "4.2 s"), (9.97, "10 s"), (21.2, "21 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-:--"), (math.inf, "-:--"), (8.2, "0:09"), (750, "12:30"), (7500, "2:05:00")]
)
def test_time_left_reads_like_a_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("top1", 0.98611, "98.61%"), ("loss", 1234.5678, "1235"), ("loss", 2.302585, "2.303"),
        ("loss", 0.11312, "0.1131"), ("loss", 0.009902, "0.009902"), ("loss", 0.0001, "0.0001000"),
        ("loss", 0.0, "0.000"), ("loss", 0.0000123, "1.230e-05"), ("loss", -0.25, "-0.2500"),
        ("loss", 123456.0, "1.235e+05"), ("loss", math.nan, "nan"), ("AP", 0.009902, "0.010"), ("AP", 1.0, "1.000"),
        ("AP", 0.00042, "0.0004"), ("AP", 0.0, "0.000"), ("APL", -1.0, "none"), ("correlation", -1.0, "-1.000"),
        ("squared_error", 0.0000123, "1.2e-05"), ("edit_distance", 2.5, "2.500"), ("mean_accuracy", 0.5, "50.00%"),
    ],
)  # fmt: skip
def test_a_share_is_shown_in_percent_and_all_else_as_a_number(name: str, value: float, text: str) -> None:
    assert metric_value(name, value) == text


@pytest.mark.parametrize("name", ["loss", "AP", "top1"])
def test_no_figure_below_10_000_is_wider_than_its_column(name: str) -> None:
    values = [10.0**power * digits for power in range(-9, 4) for digits in (1, 1.2345678, 9.99)]
    values = [value for value in values if name == "loss" or 0.0001 <= value <= 1] + [0.0]
    assert max(len(metric_value(name, value)) for value in values) == metric_width(name)


def test_long_rows_are_wrapped_at_80_columns_and_short_ones_are_as_they_were() -> None:
    prose, entries = "so many words " * 12, f"short  one\n{'a longer one ' * 8}\nlast"
    rows = {"sums": prose, "other shape": entries, "compute": "fp32,  two blanks", "gradients": ""}
    head, *lines = block("head", rows).splitlines()
    assert 75 < max(map(len, lines)) <= 80
    assert head == "head"
    texts = [line[15:] for line in lines]
    assert texts[-1] == "fp32,  two blanks"
    assert " ".join(texts[:-5]).split() == prose.split()
    first, second, third, fourth = texts[-5:-1]
    assert (first, second[:8], third[:4], fourth) == ("short  one", "a longer", "  a ", "last")


def test_a_word_that_is_too_long_is_left_whole() -> None:
    assert block("", {"file": f"in {'x' * 90}"}).splitlines()[1:] == ["  file  in", f"        {'x' * 90}"]


def test_what_is_there_to_be_copied_is_in_one_line() -> None:
    rows = {"next": f"samebits eval {'x' * 90}", "data": "word " * 30}
    assert block("", rows, whole=["next"]).splitlines()[1] == f"  next  {rows['next']}"


def test_a_metric_has_a_readable_name() -> None:
    assert [metric_name(name) for name in ("top1", "top5", "edit_distance")] == ["top-1", "top-5", "edit distance"]


def test_the_rate_leaves_out_what_lies_between_the_steps() -> None:
    now = 0.0
    rate = Rate(clock=lambda: now)
    assert rate.samples_per_s == 0
    assert rate.seconds_for(100) is None
    for _ in range(4):
        now += 0.5
        rate.add(50)
    now += 1000
    rate.resume()
    now += 0.5
    rate.add(50)
    assert rate.samples_per_s == pytest.approx(100)
    assert rate.seconds_for(1000) == pytest.approx(10)


def test_the_rate_follows_the_last_seconds() -> None:
    now = 0.0
    rate = Rate(window_s=5, clock=lambda: now)
    for step in range(200):
        now += 0.1 if step < 100 else 0.2
        rate.add(10)
    assert rate.samples_per_s == pytest.approx(50)
