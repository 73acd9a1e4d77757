"""A tracker receives each record of a run once, also after a resume; what it does wrong stays its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samebits.config.schema import ReportConfig
from samebits.errors import ConfigError
from samebits.recipes.trust import check_tracker_files
from samebits.report.trackers.start import TrackerProcess, Trackers
from samebits.report.trackers.tracker import check_trackers
from tests.runs import LONG_S, TINY, processes_with, samebits, wait_until, weights
from tests.unit.report.tracked_runs import NOTES, SHA256, make_run, notes, track, write_records, write_result

HANGS = NOTES.replace(
    "def log(self, step, values):", "def log(self, step, values):\n        import time; time.sleep(999)"
)
FAILS = NOTES.replace("def log(self, step, values):", "def log(self, step, values):\n        raise OSError(28, 'full')")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "notes.py").write_text(NOTES)
    return make_run(tmp_path / "run")


def test_a_tracker_receives_settings_records_and_the_hash(run: Path) -> None:
    write_records(run, range(1, 4))
    write_result(run)
    assert track(run, str(run.parent / "notes.py"), "done") == []
    first, *logged, last = notes(run)
    assert first[1] == "run"
    assert first[3:] == ["garden", 0.1, False]
    assert [line[1] for line in logged] == [1, 2, 3, 3]
    assert logged[0][2] == {"train/loss": 1.0, "epoch": 0.1}
    assert logged[-1][2] == {"eval/top1": 0.03, "eval/odd": pytest.approx(float("nan"), nan_ok=True), "epoch": 0.3}
    assert last == ["finish", "done", SHA256]


def test_a_resumed_run_stays_one_tracked_run_and_repeats_no_step(run: Path) -> None:
    write_records(run, range(1, 6))
    track(run, str(run.parent / "notes.py"), "stopped")
    (run / "metrics.jsonl").rename(run / "old")  # as a resume from step 3 replaces it
    write_records(run, range(1, 4))
    write_records(run, range(4, 9))
    track(run, str(run.parent / "notes.py"), "stopped")
    starts = [line for line in notes(run) if line[0] == "start"]
    assert [line[5] for line in starts] == [False, True]
    assert starts[0][2] == starts[1][2]
    train = [line[1] for line in notes(run) if line[0] == "log" and "train/loss" in line[2]]
    assert train == list(range(1, 9))


def test_a_new_run_in_the_same_folder_is_another_tracked_run(run: Path) -> None:
    write_records(run, range(1, 4))
    track(run, str(run.parent / "notes.py"), "failed")
    track(run, str(run.parent / "notes.py"), "stopped", is_new=True)
    starts = [line for line in notes(run) if line[0] == "start"]
    assert starts[0][2] != starts[1][2]
    assert len([line for line in notes(run) if line[0] == "log"]) == 2 * 4


def test_records_arrive_while_the_run_goes(run: Path) -> None:
    process = TrackerProcess(str(run.parent / "notes.py"), run, print, is_new=True)
    try:
        write_records(run, range(1, 3))
        path = run / "trackers" / "notes.py" / "notes.jsonl"
        wait_until(lambda: path.exists() and path.read_text().count('"log"') == 3, LONG_S)
    finally:
        process.end("stopped")
        process.close()
    assert notes(run)[-1] == ["finish", "stopped", None]


def test_a_tracker_that_fails_is_reported_with_its_log_and_the_command_to_repeat(run: Path) -> None:
    (run.parent / "fails.py").write_text(FAILS)
    write_records(run, range(1, 3))
    (text,) = track(run, str(run.parent / "fails.py"), "done")
    assert text.startswith("tracker fails.py failed, and the run is not affected: OSError: [Errno 28] full")
    assert f"samebits track {run} --to " in text
    assert "raise OSError" in (run / "logs" / "tracker-fails.py.log").read_text()


@pytest.mark.full
def test_a_tracker_that_hangs_is_killed_shortly_after_the_run(run: Path) -> None:
    (run.parent / "hangs.py").write_text(HANGS)
    write_records(run, range(1, 3))
    texts: list[str] = []
    trackers = Trackers([str(run.parent / "hangs.py")], run, texts.append)
    trackers.start(is_new=True)
    wait_until((run / "trackers" / "hangs.py" / "notes.jsonl").exists, LONG_S)
    trackers.outcome = "done"
    began = time.monotonic()
    trackers.close()
    assert time.monotonic() - began < 30
    assert "it hangs" in texts[0]
    assert not processes_with(str(run.parent / "hangs.py"))


def test_a_tracker_ends_without_the_training_process(run: Path) -> None:
    write_records(run, range(1, 3))
    code = (
        "import os, sys; from pathlib import Path; from samebits.report.trackers.start import TrackerProcess\n"
        f"TrackerProcess({str(run.parent / 'notes.py')!r}, Path({str(run)!r}), print, is_new=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "PYTHONPATH": os.getcwd()})
    path = run / "trackers" / "notes.py" / "notes.jsonl"
    wait_until(lambda: path.exists() and '"finish", "failed"' in path.read_text(), LONG_S)
    wait_until(lambda: not processes_with(str(run.parent / "notes.py")), LONG_S)


def test_a_strangers_run_folder_leads_a_tracker_to_no_place_outside(run: Path) -> None:
    outside = run.parent / "outside"
    outside.mkdir()
    (run / "trackers" / "notes.py").mkdir(parents=True)
    (run / "trackers" / "notes.py" / "notes.jsonl").symlink_to(outside / "notes.jsonl")
    write_records(run, range(1, 3))
    (text,) = track(run, str(run.parent / "notes.py"), "done")
    assert "is a link to a place outside of the run folder" in text
    assert not list(outside.iterdir())


@pytest.mark.parametrize("file", ["", "x = 1", NOTES + NOTES.replace("Notes(", "Others(")])
def test_a_file_without_exactly_one_tracker_is_reported(run: Path, file: str) -> None:
    (run.parent / "wrong.py").write_text(file)
    (text,) = track(run, str(run.parent / "wrong.py"), "done")
    assert "of samebits.Tracker" in text


def test_a_missing_package_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        check_trackers(["tensorboard", "wandb"])
    assert error.value.slots["fix"] == "pip install 'samebits[wandb]'"
    with pytest.raises(ConfigError, match="there is no such file"):
        check_trackers(["no_such_tracker.py"])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"trackers": ["wandbb"]}, "must be one of tensorboard, wandb"),
        ({"trackers": ["a/notes.py", "b/notes.py"]}, "a name twice"),
        ({"trackers": ["tensorboard"], "tensorboard": False}, "Remove one of them"),
    ],
)
def test_wrong_names_of_trackers_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ReportConfig.model_validate(settings)


@pytest.mark.full
def test_trackers_that_fail_and_hang_change_no_bit_of_a_run(tmp_path: Path) -> None:
    for name, text in (("notes.py", NOTES), ("hangs.py", HANGS), ("fails.py", FAILS)):
        (tmp_path / name).write_text(text)
    train = ["train", TINY, "device=cpu", "report.every_steps=1", "report.tensorboard=false", "--procs", 2, "--run-dir"]
    home = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    samebits(*train, "plain", cwd=tmp_path, **home)
    settings = ["report.trackers=[notes.py, hangs.py, fails.py]", "report.project=garden"]
    done = samebits(*train, "tracked", *settings, cwd=tmp_path, **home)
    assert weights(tmp_path / "tracked") == weights(tmp_path / "plain")
    assert "tracker fails.py failed, and the run is not affected" in done.stdout
    assert "tracker hangs.py failed, and the run is not affected" in done.stdout
    run = tmp_path / "tracked"
    assert notes(run)[-1] == ["finish", "done", weights(run)]
    assert [line[1] for line in notes(run) if line[0] == "log" and "train/loss" in line[2]] == list(range(1, 11))
    assert not processes_with(str(tmp_path))
    (tmp_path / "fails.py").write_text(NOTES)  # corrected
    samebits("track", "tracked", "--to", "fails.py", cwd=tmp_path, **home)
    received = (run / "trackers" / "fails.py" / "notes.jsonl").read_text()
    assert received.count("train/loss") == 10


def test_a_tracker_file_that_only_a_run_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = tmp_path / "notes.py"
    file.write_text(NOTES)
    with pytest.raises(ConfigError, match="is not trusted") as error:
        check_tracker_files([str(file)], ["epochs=3"])
    assert error.value.slots["fix"].endswith(f"samebits trust {file}")
    check_tracker_files([str(file)], [f"report.trackers=[{file}]"])  # the command line names it
    check_tracker_files([str(file), "wandb"], [])
    file.write_text(FAILS)
    with pytest.raises(ConfigError, match="is not trusted"):
        check_tracker_files([str(file)], [])
