"""Means over seeds, and `samebits compare`: what differs, side by side."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.cli.main import run as run_command
from samebits.report.console import Console
from samebits.run_views.compare import Comparison, compare
from samebits.run_views.history import read_history
from samebits.run_views.page.build import comparison_charts, report_page
from samebits.run_views.page.notebook import figures
from samebits.run_views.summary import read_summary
from samebits.run_views.table import SeedGroup, group_by_setting, seed_table
from tests.unit.run_views.folders import launcher_line, log_line, make_run


def seed_lines(groups: list[SeedGroup], width: int) -> list[str]:
    """The lines of the table of groups on a terminal."""
    stream = io.StringIO()
    Console(stream, columns=width).draw(seed_table(groups, width))
    return stream.getvalue().splitlines()


def seeded(
    run: Path, seed: int, *, lr: float = 0.1, top1: float = 0.9, more: str = "", done: int | None = None
) -> Path:
    make_run(run, lr=lr, top1=top1, done_epochs=done)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", f"seed: {seed}") + more)
    return run


@pytest.mark.parametrize("num_seeds", [2, 3])
def test_charts_of_several_seeds_have_one_curve_with_a_band_for_each_setting(tmp_path: Path, num_seeds: int) -> None:
    runs = []
    for lr in (0.1, 0.3):
        for seed in range(num_seeds):
            runs.append(seeded(tmp_path / f"{lr}-{seed}", seed, lr=lr, top1=0.5 + seed / 10))
    comparison = compared(*runs)
    charts = {each["title"]: each for each in comparison_charts(comparison, comparison.legends)}
    chart = charts["Validation top-1"]
    assert {line["name"] for line in chart["lines"]} == {f"optim.lr={lr} mean of {num_seeds}" for lr in (0.1, 0.3)}
    curves = [run.curves.get("eval", "top1") for run in comparison.runs[:num_seeds]]
    for line in chart["data"]["lines"]:
        assert line["y"] == pytest.approx(
            [sum(values) / num_seeds for values in zip(*(c.values for c in curves), strict=True)], rel=1e-4
        )
    heights = [y for _, y in chart["lines"][0]["band"]]
    lows, highs = heights[: len(curves[0])], heights[len(curves[0]) :][::-1]
    means = [y for _, y in chart["lines"][0]["points"]]
    assert all(low > mean > high for low, mean, high in zip(lows, means, highs, strict=True))  # y grows downwards
    drawn = figures(comparison.runs)["validation-top-1.svg"]
    assert drawn.count("<polygon") == 2
    assert f"optim.lr=0.3 mean of {num_seeds}" in drawn


def test_runs_that_do_not_end_or_have_one_seed_each_keep_a_curve_of_their_own(tmp_path: Path) -> None:
    runs = [seeded(tmp_path / "a", 0), seeded(tmp_path / "b", 1), seeded(tmp_path / "c", 2, done=1)]
    for some in (runs, [seeded(tmp_path / f"x{lr}", 0, lr=lr) for lr in (0.1, 0.3)]):
        comparison = compared(*some)
        for chart in comparison_charts(comparison, comparison.legends):
            assert len(chart["lines"]) <= len(some)
            assert all(not line["band"] and "mean of" not in line["name"] for line in chart["lines"])


def compared(*runs: Path) -> Comparison:
    return compare([read_history(run) for run in runs])


def test_runs_whose_settings_differ_only_in_the_seed_have_mean_deviation_and_number(tmp_path: Path) -> None:
    values = {(0.1, 0): 0.5, (0.1, 1): 0.75, (0.1, 2): 1.0, (0.3, 0): 0.875}
    runs = [seeded(tmp_path / f"{lr}-{seed}", seed, lr=lr, top1=top1) for (lr, seed), top1 in values.items()]
    groups = group_by_setting([read_summary(run) for run in runs])
    assert [(each.settings, each.seeds) for each in groups] == [
        ({"optim.lr": 0.3}, [0]),
        ({"optim.lr": 0.1}, [0, 1, 2]),
    ]
    assert groups[0].metrics["top1"] == (0.875, None)
    assert groups[1].metrics == {"top1": (0.75, 0.25), "loss": (0.5, 0.0)}
    assert seed_lines(groups, 80) == [
        "optim.lr  n             top-1              loss",
        "     0.3  1            87.50%            0.5000",
        "     0.1  3  75.00% +- 25.00%  0.5000 +- 0.0000",
    ]
    assert max(map(len, seed_lines(groups, 30))) <= 30


@pytest.mark.parametrize(
    ("more", "done", "num_seeds"),
    [
        ("loader: {num_workers: 3}\n", None, 2),  # without effect on the result
        ("data: {root: /other}\n", None, 0),
        ("max_steps: 9000\n", None, 0),
        ("", 1, 0),  # stopped: its last evaluation is another one
    ],
)
def test_only_complete_runs_of_a_kind_are_repeats(tmp_path: Path, more: str, done: int | None, num_seeds: int) -> None:
    first, other = seeded(tmp_path / "a", 0), seeded(tmp_path / "b", 1, done=done)
    config = other / "config.yaml"
    kept = [line for line in config.read_text().splitlines() if line.partition(":")[0] != more.partition(":")[0]]
    config.write_text("\n".join(kept) + f"\n{more}")
    groups = group_by_setting([read_summary(run) for run in (first, other)])
    assert sum(len(group.seeds) for group in groups) == num_seeds


def test_two_runs_of_one_seed_are_no_two_samples(tmp_path: Path) -> None:
    runs = [seeded(tmp_path / "a", 3), seeded(tmp_path / "b", 3), seeded(tmp_path / "c", 4)]
    groups = group_by_setting([read_summary(run) for run in runs])
    assert [group.seeds for group in groups] == [[3, 4]]
    assert group_by_setting([read_summary(run) for run in runs[:2]]) == []


def test_a_mean_beyond_the_range_of_numbers_is_left_out(tmp_path: Path) -> None:
    runs = [read_summary(seeded(tmp_path / str(seed), seed)) for seed in range(2)]
    for run in runs:
        run.metrics = {"top1": 1.7e308, "loss": 0.5}
    groups = group_by_setting(runs)
    assert [group.metrics for group in groups] == [{"loss": (0.5, 0.0)}]
    assert seed_lines(groups, 80)[0].split() == ["n", "loss"]


def test_compare_shows_means_and_curves_before_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(seeded(tmp_path / str(seed), seed, top1=0.5 + seed / 4)) for seed in range(2)]
    assert run_command(["compare", *runs]) == 0
    assert "n             top-1" in capsys.readouterr().out
    assert run_command(["report", *runs, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.index(">Curves<") < page.index("62.50% +- 17.68%") < page.index(">Values<")
    capsys.readouterr()
    assert run_command(["compare", *runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_setting"][0]["n"] == 2


def write_samples(run: Path, digests: dict[str, str]) -> None:
    content: object = {"data": digests}
    for name in ("internalParameters", "buildDefinition", "predicate"):
        content = {name: content}
    (run / "provenance.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("seeds", "digests", "shown"),
    [
        ((0, 1), ("a", "b"), []),  # each seed reads a sample with another key
        ((0, 0), ("a", "a"), []),
        ((0, 0), ("a", "b"), ["training sample 7"]),
    ],
)
def test_hashes_of_samples_are_listed_only_if_one_seed_has_two(
    tmp_path: Path, seeds: tuple[int, int], digests: tuple[str, str], shown: list[str]
) -> None:
    runs = [seeded(tmp_path / str(number), seed) for number, seed in enumerate(seeds)]
    for number, (run, digest) in enumerate(zip(runs, digests, strict=True)):
        own = {f"evaluation sample {number}": "c", f"sizes of the training files {number}": "d"}
        write_samples(run, {"training sample 7": digest, "training sample 9": digest, **own})
    names = [row.name for row in compared(*runs).section("code and data")]
    assert [name for name in names if " sample " in name] == shown
    assert len(names) == len(shown) + 2


def test_legends_name_the_settings_that_differ_and_else_the_run(tmp_path: Path) -> None:
    runs = [seeded(tmp_path / name, seed, lr=lr) for name, seed, lr in (("x", 0, 0.1), ("y", 1, 0.1), ("z", 0, 0.3))]
    assert compared(*runs).legends == ["a optim.lr=0.1 seed=0", "b optim.lr=0.1 seed=1", "c optim.lr=0.3 seed=0"]
    assert compared(runs[0], runs[0]).legends == ["a x", "b x"]
    wide = seeded(tmp_path / "w", 5, lr=0.9, more="max_steps: 7\nprecision2: bf16\n")
    assert compared(runs[0], wide).legends == ["a x", "b w"]
    assert ">b seed=1<" in report_page([read_history(run) for run in runs[:2]])


def test_settings_that_differ_are_listed_apart_from_those_without_effect(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=0.3, top1=0.8)
    (b / "config.yaml").write_text((b / "config.yaml").read_text().replace("num_workers: auto", "num_workers: 3"))
    found = compare([read_history(a), read_history(b)])
    assert [(row.name, row.values) for row in found.section("settings")] == [("optim.lr", ("0.1", "0.3"))]
    assert [(row.name, row.values) for row in found.section("other settings")] == [
        ("loader.num_workers", ("auto", "3"))
    ]
    metrics = {row.name: row.values for row in found.section("metrics")}
    assert metrics["top-1"] == metrics["best top-1"] == ("90.00%", "80.00%")
    times = {row.name: row.values for row in found.section("time")}
    assert times["training"] == ("50 s", "50 s")
    assert times["waiting for data"] == ("4.0%", "4.0%")
    assert not found.section("environment")


def test_the_time_of_a_resumed_run_is_said_to_be_that_of_its_last_command(tmp_path: Path) -> None:
    a, b, c = make_run(tmp_path / "a"), make_run(tmp_path / "b"), make_run(tmp_path / "c")
    for run in (b, c):
        with (run / "logs/rank-0.log").open("a") as file:
            file.write(log_line(30, "INFO", "training from step 50 of 150, rank 0 of 2"))
    with (c / "logs/launcher.log").open("a") as file:
        file.write(launcher_line(29, "restart 1 of 3"))
    times = {row.name: row.values for row in compare([*map(read_history, (a, b, c))]).section("time")}
    assert times["took"] == ("1 min 01 s", "1 min 01 s since the resume", "1 min 01 s")


def test_versions_and_code_are_listed_where_they_differ(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    text = (b / "environment.json").read_text()
    (b / "environment.json").write_text(text.replace("2.15.0", "2.14.1").replace("60d1", "77aa"))
    found = compare([read_history(a), read_history(b)])
    assert [(row.name, row.values) for row in found.section("environment")] == [("torch", ("2.15.0", "2.14.1"))]
    assert [row.values for row in found.section("code and data")] == [("60d1", "77aa")]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_many_runs_are_shown_in_blocks_that_fit_the_width(
    tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch, printed: Callable[..., str]
) -> None:
    runs = [str(make_run(tmp_path / f"run-{number}", lr=0.1 * (number + 1))) for number in range(6)]
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(["compare", *runs]).splitlines()
    assert max(map(len, lines)) <= columns
    assert all(any(f"{letter} run-{number}" in line for line in lines) for number, letter in enumerate("abcdef"))


def test_json_has_the_values_of_each_run(tmp_path: Path, printed: Callable[..., str]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", epochs=4)
    found = json.loads(printed(["compare", str(a), str(b), "--json"]))
    assert found["settings"] == {"epochs": ["3", "4"]}
    assert [run["run"] for run in found["runs"]] == ["a", "b"]


def test_one_run_or_no_run_folder_is_refused(tmp_path: Path, printed: Callable[..., str]) -> None:
    run = make_run(tmp_path / "a")
    assert run_command(["compare", str(run)]) == 2
    assert "is not a run folder" in printed(["compare", str(run), str(tmp_path)], 5)
