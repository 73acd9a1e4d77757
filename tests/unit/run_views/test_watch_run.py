"""`samebits watch`: follows the files of a run until it ends."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from samebits.cli.main import run as run_command
from samebits.run_views.record_reader import RecordReader
from samebits.run_views.watch import LiveView
from tests.runs import SAMEBITS, environment, kill_session, start
from tests.unit.run_views.folders import epoch_records, log_line, make_run, own_lock, write_result


def lines(epoch: int) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in epoch_records(epoch, 3, 0.9))


def test_a_half_written_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", done_epochs=1)
    reader = RecordReader(run)
    records, is_new = reader.poll()
    assert (len(records), is_new) == (101, True)
    more = lines(1)
    with (run / "metrics.jsonl").open("ab", buffering=0) as file:
        for start in range(0, len(more), 777):
            file.write(more[start : start + 777])
            found, is_new = reader.poll()
            assert not is_new
            records += found
    assert len(records) == 202
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 101))
    assert reader.num_skipped == 0


def test_a_resume_that_replaces_the_records_starts_the_curves_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", done_epochs=2, lock=own_lock())
    view = LiveView(run)
    assert view.curves.last_step == (100, 2.0)
    part = run / "metrics.part"
    part.write_bytes(lines(0))
    part.replace(run / "metrics.jsonl")
    view.poll()
    assert view.curves.last_step == (50, 1.0)
    assert len(view.curves.get("train", "loss")) == 50
    (run / "metrics.jsonl").unlink()
    view.poll()
    assert view.curves.last_step == (50, 1.0)


def test_the_view_shows_progress_curves_ranks_and_warnings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", done_epochs=1, lock=own_lock())
    with (run / "logs/rank-0.log").open("a") as file:
        file.write(log_line(30, "WARNING", "rank 1 is slow: a micro-batch takes 20 ms there"))
    view = LiveView(run)
    for width in (80, 120):
        rows = [row.plain for row in view.rows(width, 40)]
        text = "\n".join(rows)
        assert max(map(len, rows)) <= width
        for part in (
            "running",
            "on 2 processes",
            "33%",
            "step 50/150",
            "data wait 3%",
            "0:20 left",
            "rank 1",
            "120 ms",
            "is slow",
        ):
            assert part in text, part
    plain = "\n".join(row.plain for row in view.rows(80, 40, is_ascii=True))
    assert plain.isascii()


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("stopped", 1)])
def test_an_ended_run_is_shown_once(tmp_path: Path, state: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", done_epochs=3 if state == "done" else 1)
    started = time.monotonic()
    assert run_command(["watch", str(run)]) == code
    assert time.monotonic() - started < 30
    assert f"a  digits  {state} on 2 processes" in capsys.readouterr().out


def test_a_running_run_is_followed_to_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", done_epochs=1, lock=own_lock())
    process = start("watch", run, cwd=tmp_path)
    try:
        assert process.stdout is not None
        assert "step 50/150" in process.stdout.readline()
        with (run / "logs/rank-0.log").open("a") as file:
            file.write(log_line(30, "WARNING", "data loading is the bottleneck"))
        assert "data loading is the bottleneck" in process.stdout.readline()
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(lines(1) + lines(2))
        write_result(run, 3, 0.9)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "done on 2 processes" in out
        assert "step 150/150" in out
    finally:
        kill_session(process)


def test_ctrl_c_ends_the_view_with_130_and_leaves_the_run_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", done_epochs=1, lock=own_lock())
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    process = start("watch", run, cwd=tmp_path)
    try:
        assert process.stdout is not None
        assert "step 50/150" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "")
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    finally:
        kill_session(process)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["watch", str(tmp_path)]) == 5
    assert run_command(["watch", str(tmp_path / "missing")]) == 5
    assert "missing does not exist" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("script") is None, reason="needs `script`, which gives a command a terminal")
def test_colours_are_left_out_with_no_color_on_a_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    for variables, has_colours in (({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)):
        # `script` gives the command a terminal.
        command = ["script", "-qec", f"{' '.join(SAMEBITS)} watch {run}", "/dev/null"]
        done = subprocess.run(
            command, env=environment(TERM="xterm-256color", **variables), capture_output=True, check=True
        )
        assert (b"\x1b[36m" in done.stdout or b"\x1b[32m" in done.stdout) == has_colours
