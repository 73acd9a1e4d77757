"""`samebits runs`: states, conditions, order, widths, the cache."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from samebits.cli.main import run as run_command
from samebits.errors import ConfigError
from samebits.run_views import summary
from samebits.run_views.summary import RunSummary
from samebits.run_views.table import cut, parse_condition, select
from tests.runs import SAMEBITS, environment
from tests.unit.run_views.folders import launcher_line, log_line, make_run, own_lock, write_result


def by_name(folder: Path) -> dict[str, RunSummary]:
    return {run.name: run for run in summary.read_summaries(folder)}


def test_a_run_is_done_stopped_failed_or_running(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "done")
    stopped = make_run(runs / "stopped", done_epochs=1)
    with (stopped / "logs/rank-0.log").open("a") as file:
        file.write(log_line(30, "WARNING", "stopped after step 50 and saved; resume with\n  samebits train"))
    failed = make_run(runs / "failed", done_epochs=1)
    (failed / "logs/launcher.log").write_text(launcher_line(20, "training error: loss is not finite\n  rank  1"))
    raised = make_run(runs / "raised", done_epochs=1)
    with (raised / "logs/rank-0.log").open("a") as file:
        file.write(log_line(30, "ERROR", "ended by ValueError\nTraceback (most recent call last):\nValueError: no"))
    make_run(runs / "killed", done_epochs=1, lock=f"process 4194305 on {os.uname().nodename}")
    make_run(runs / "running", done_epochs=1, lock=own_lock())
    make_run(runs / "elsewhere", done_epochs=1, lock="process 7 on another-host")
    found = by_name(runs)
    assert {name: run.state for name, run in found.items()} == {
        "done": "done", "stopped": "stopped", "failed": "failed", "raised": "failed", "killed": "failed",
        "running": "running", "elsewhere": "running",
    }  # fmt: skip
    assert found["failed"].reason == "training error: loss is not finite"
    assert found["raised"].reason == "rank 0 ended by ValueError: ValueError: no"
    assert "4194305" in found["killed"].reason
    assert (found["running"].step, found["running"].num_steps) == (50, 150)


def test_a_run_has_the_epoch_and_the_training_loss_of_its_last_step_in_each_state(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/done")
    make_run(tmp_path / "runs/stopped", done_epochs=1)
    early = make_run(tmp_path / "runs/early", done_epochs=2)
    write_result(early, 2, 0.9)  # ended before the epochs of its settings
    found = {run.name: (run.epoch, round(run.train_loss or 0, 3)) for run in by_name(tmp_path / "runs").values()}
    assert found == {"done": (3.0, 0.05), "stopped": (1.0, 1.583), "early": (2.0, 0.817)}


@pytest.mark.parametrize(("limit", "expected"), [("3", 3), ("120", 120), ("9000", 150), ("null", 150)])
def test_max_steps_limits_the_steps_of_a_run_that_is_not_complete(tmp_path: Path, limit: str, expected: int) -> None:
    run = make_run(tmp_path / "runs/a", done_epochs=1)
    with (run / "config.yaml").open("a") as file:
        file.write(f"max_steps: {limit}\n")
    assert by_name(tmp_path / "runs")["a"].num_steps == expected


def test_a_published_model_is_no_run_nor_proposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "pushed", "pulled"):
        make_run(tmp_path / "runs" / name)
    for name in ("pushed", "pulled"):
        run = tmp_path / "runs" / name
        for entry in ("environment.json", "metrics.jsonl", "run.lock", "config.diff.yaml"):
            (run / entry).unlink()
        for entry in ("checkpoints", "logs"):
            shutil.rmtree(run / entry)
        for entry in ("README.md", "config.json", "model.safetensors" if name == "pushed" else "weights.safetensors"):
            (run / entry).touch()
    assert by_name(tmp_path / "runs").keys() == {"run", "pulled"}
    assert run_command(["report", str(tmp_path / "runs/pushed")]) != 0
    assert "runs/pushed," not in capsys.readouterr().err.split("fix")[1]
    for entry in ("README.md", "config.json", "model.safetensors"):  # an export beside a card of the user's own
        (tmp_path / "runs/run" / entry).touch()
    (tmp_path / "runs/run/weights.safetensors").touch()
    assert by_name(tmp_path / "runs").keys() == {"run", "pulled"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abcdefghijklmnop", "abc...op"),
        ("\\x1b[31mred\\x1b[0m", "\\x1...0m"),
        ("模型模型模型模型", "模...型"),
        ("abcdefgh", "abcdefgh"),
    ],
)
def test_a_long_name_keeps_its_beginning_and_its_end(text: str, shown: str) -> None:
    assert cut(text, 8) == shown


def test_a_silent_run_of_another_host_counts_as_failed_after_an_hour(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/far", done_epochs=1, lock="process 7 on another-host")
    for path in (run / "metrics.jsonl", run / "logs/rank-0.log", run / "run.lock"):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    assert by_name(tmp_path / "runs")["far"].state == "failed"


def test_a_run_between_fault_and_restart_is_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/a", done_epochs=1, lock=f"process 4194305 on {os.uname().nodename}")
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    (run / "logs/launcher.log").write_text(f"{now} launch error: rank 0 was killed\n{now} restart 1 of 3\n")
    assert by_name(tmp_path / "runs")["a"].state == "running"


def test_conditions_select_runs_by_settings_metrics_and_columns(tmp_path: Path) -> None:
    for number, lr in enumerate((0.03, 0.1, 0.3)):
        make_run(tmp_path / f"run-{number}", lr=lr, top1=0.9 - 0.1 * number, done_epochs=3 if number else 1)
    runs = summary.read_summaries(tmp_path)

    def names(*conditions: str, sort: str | None = None, is_reversed: bool = False) -> list[str]:
        chosen = select(runs, map(parse_condition, conditions), sort, is_reversed=is_reversed)
        return [run.name for run in chosen]

    assert names("optim.lr>0.1") == ["run-2"]
    assert names("optim.lr >= 0.1", "top1>0.75") == ["run-1"]
    assert names("state=done") == ["run-1", "run-2"]
    assert names("state!=done") == ["run-0"]
    assert names("optim.name=sgd", "optim.lr=3e-2") == ["run-0"]
    assert names("started>2100-01-01") == []
    assert names(f"sha256={runs[1].weights_sha256[:6]}") == ["run-1"]
    assert names(sort="top1") == ["run-1", "run-2", "run-0"]  # best first
    assert names(sort="top1", is_reversed=True) == ["run-0", "run-2", "run-1"]
    assert names(sort="optim.lr") == ["run-0", "run-1", "run-2"]
    assert names(sort="sha256")[-1] == "run-0"  # it has none


@pytest.mark.parametrize(
    ("text", "problem"),
    [("optim.lr", "--where is 'optim.lr'"), ("started>noon", "the time 'noon'"), ("top1>", "--where is 'top1>'")],
)
def test_a_condition_of_another_form_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_condition(text)


def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    with pytest.raises(ConfigError) as caught:
        select(summary.read_summaries(tmp_path), [parse_condition("optim.lrr>1")], None)
    assert "Use optim.lr." in str(caught.value)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_fits_the_width_and_drops_columns_by_importance(
    tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch, printed: Callable[..., str]
) -> None:
    make_run(tmp_path / "runs" / ("a-run-with-quite-a-long-name-" + "x" * 40), name="a_recipe_with_a_name")
    make_run(tmp_path / "runs/b", done_epochs=2)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(["runs", str(tmp_path / "runs")]).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].split()[:1] == ["run"]
    assert "top-1" in lines[0]
    assert ("sha256" in lines[0]) == (columns > 80)
    assert "90.00%" in lines[1] + lines[2]


def test_the_output_has_no_escapes_and_no_other_characters_in_an_ascii_locale(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / ("long-" * 12))
    done = subprocess.run(
        [*SAMEBITS, "runs", str(tmp_path / "runs")],
        env=environment(LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", XDG_CACHE_HOME=str(tmp_path / "cache")),
        capture_output=True,
        check=True,
    )
    assert b"..." in done.stdout
    assert all(32 <= byte < 127 or byte == 10 for byte in done.stdout)


def test_json_has_each_run_with_its_settings(tmp_path: Path, printed: Callable[..., str]) -> None:
    make_run(tmp_path / "a")
    (run,) = json.loads(printed(["runs", str(tmp_path), "--json"]))
    assert (run["run"], run["state"], run["metrics"]["top1"], run["settings"]["optim.lr"]) == ("a", "done", 0.9, 0.1)


def test_a_folder_without_runs_and_a_missing_one_are_named(tmp_path: Path, printed: Callable[..., str]) -> None:
    assert "no run folder in" in printed(["runs", str(tmp_path)])
    assert run_command(["runs", str(tmp_path / "missing")]) == 2


def test_runs_are_found_in_folders_of_folders_and_links_do_not_lead_around(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/sweep/trial-1")
    make_run(tmp_path / "other/linked")
    (tmp_path / "runs/link").symlink_to(tmp_path / "other/linked")
    (tmp_path / "runs/sweep/around").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/no-run").mkdir()
    assert [path.name for path in summary.find_runs(tmp_path / "runs")] == ["link", "trial-1"]
    assert summary.find_runs(tmp_path / "other/linked") == [tmp_path / "other/linked"]


def test_settings_are_read_only_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        make_run(tmp_path / "runs" / name, done_epochs=1 if name == "b" else None)
    read: list[str] = []
    original = summary.settings_of
    monkeypatch.setattr(summary, "settings_of", lambda files: (read.append(files.path.name), original(files))[1])
    found = by_name(tmp_path / "runs")
    assert read == ["b"]  # its number of steps follows from them
    assert (found["a"].settings["optim.lr"], found["c"].to_plain()["settings"]["optim.lr"]) == (0.1, 0.1)
    assert found["a"].settings is found["a"].settings
    assert read == ["b", "a", "c"]


def test_a_changed_run_is_read_again(tmp_path: Path) -> None:
    for name in "abc":
        make_run(tmp_path / "runs" / name, done_epochs=1)
    assert len(by_name(tmp_path / "runs")) == 3
    (tmp_path / "runs/b/metrics.jsonl").write_text('{"kind": "eval", "step": 50, "epoch": 1.0, "top1": 0.25}\n')
    assert by_name(tmp_path / "runs")["b"].metrics == {"top1": 0.25}


def test_a_process_that_ended_shows_with_unchanged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    make_run(tmp_path / "runs/a", done_epochs=1, lock=f"process {process.pid} on {os.uname().nodename}")
    assert by_name(tmp_path / "runs")["a"].state == "running"
    process.communicate(b"\n")
    assert by_name(tmp_path / "runs")["a"].state == "failed"


def test_a_listing_loads_no_torch_and_writes_no_file(tmp_path: Path) -> None:
    for number in range(3):
        make_run(tmp_path / "runs" / f"run-{number:03}", epochs=1)
    code = (
        "import sys; from samebits.cli.main import run\n"
        "for command in sys.argv[3:]: assert run(eval(command)) == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'tensorboard'} & set(sys.modules)"
    )
    a, b = str(tmp_path / "runs/run-000"), str(tmp_path / "runs/run-001")
    commands = [["runs", str(tmp_path / "runs")], ["compare", a, b], ["report", a]]
    arguments = [sys.executable, "-P", "-c", code, "-", "-", *map(repr, commands)]
    home = environment(HOME=str(tmp_path / "home"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    done = subprocess.run(arguments, env=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.full
def test_1000_runs_are_listed_within_seconds(tmp_path: Path) -> None:
    for number in range(1000):
        make_run(tmp_path / "runs" / f"run-{number:04}", epochs=1, lr=0.001 * (number + 1))
    command = [*SAMEBITS, "runs", str(tmp_path / "runs"), "--where", "optim.lr>0.5", "--sort", "top1"]
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(done.stdout.splitlines()) == 501
    # Of the processor's time, since other programs may run meanwhile; half a second at rest.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
