"""`samebits compare`: what differs, side by side."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.cli.main import run as run_command
from samebits.run_views.compare import compare
from samebits.run_views.history import read_history
from tests.unit.run_views.folders import launcher_line, log_line, make_run


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
