from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import textwrap

import pytest

from lockstep.report.console import Console


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _train(console: Console, clock: Clock, *, num_epochs: int, epoch_steps: int, step_s: float) -> None:
    num_steps = num_epochs * epoch_steps
    for step in range(1, num_steps + 1):
        clock.seconds += step_s
        console.progress(
            epoch=(step - 1) // epoch_steps + 1,
            num_epochs=num_epochs,
            step=step,
            num_steps=num_steps,
            loss=1 / step,
            samples_per_s=9812.3,
            left_s=(num_steps - step) * step_s,
        )


def test_a_log_file_gets_a_line_for_each_tenth_of_an_epoch() -> None:
    out, clock = io.StringIO(), Clock()
    _train(Console(out, False, clock), clock, num_epochs=2, epoch_steps=1000, step_s=0.1)
    lines = out.getvalue().splitlines()
    assert lines[0] == "epoch 1/2  step 1/2,000  loss 1.000      9,812 samples/s  3:20 left"
    assert 19 <= len(lines) <= 21
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_a_quick_run_gets_few_lines_in_a_log_file() -> None:
    out, clock = io.StringIO(), Clock()
    _train(Console(out, False, clock), clock, num_epochs=10, epoch_steps=23, step_s=0.04)
    assert len(out.getvalue().splitlines()) <= 3


def test_a_slow_run_says_something_each_minute_in_a_log_file() -> None:
    out, clock = io.StringIO(), Clock()
    _train(Console(out, False, clock), clock, num_epochs=1, epoch_steps=100_000, step_s=1.0)
    assert 1600 <= len(out.getvalue().splitlines()) <= 1670


def test_a_terminal_gets_one_line_that_is_drawn_anew() -> None:
    out, clock = io.StringIO(), Clock()
    _train(Console(out, True, clock), clock, num_epochs=2, epoch_steps=50, step_s=0.0625)
    assert "\n" not in out.getvalue()
    assert out.getvalue().count("\r") == 51


def test_how_much_is_done_is_shown_on_a_terminal_only() -> None:
    for interactive in (True, False):
        out, clock = io.StringIO(), Clock()
        console = Console(out, interactive, clock)
        for done in range(1, 101):
            console.share_done("evaluating", done, 100)
        console.close()
        assert out.getvalue().count("evaluating") == (2 if interactive else 0)
        assert ("100/100" in out.getvalue()) == interactive


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_the_line_of_progress_is_never_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    out, clock = io.StringIO(), Clock()
    _train(Console(out, True, clock), clock, num_epochs=10, epoch_steps=469, step_s=0.5)
    drawn = [line.replace("\x1b[2K", "") for line in out.getvalue().split("\r")]
    assert max(map(len, drawn)) < columns
    assert any("━" in line for line in drawn) == (columns >= 80)


def test_what_is_said_stands_above_the_line_of_progress() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(out, True, clock)
    _train(console, clock, num_epochs=1, epoch_steps=1, step_s=1.0)
    before = out.getvalue()
    console.say("restart 1 of 3")
    added = out.getvalue()[len(before) :]
    assert added.startswith("\r\x1b[2Krestart 1 of 3\n")
    assert added.endswith("0:00 left")
    console.close()
    assert out.getvalue().endswith("\r\x1b[2K")


def test_the_table_on_a_terminal_has_its_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    console = Console(out, True)
    console.evaluation(1, {"loss": 0.8721, "top1": 0.91944}, 360)
    console.evaluation(2, {"loss": 0.2144, "top1": 1.0}, 360)
    assert out.getvalue().splitlines() == [
        " epoch       loss    top-1  samples",
        "     1     0.8721   91.94%      360",
        "     2     0.2144  100.00%      360",
    ]


def test_an_evaluation_in_a_log_file_names_its_figures() -> None:
    out = io.StringIO()
    Console(out, False).evaluation(2.5, {"loss": float("nan"), "top1": 0.5}, 10_000)
    assert out.getvalue() == "evaluation after epoch 2.50  loss nan        top-1 50.00%   10,000 samples\n"


def test_figures_of_a_log_file_stand_below_each_other() -> None:
    out = io.StringIO()
    console = Console(out, False)
    rows = [(2.302585, 0.0), (0.8721, 0.009902), (0.009902, 0.91), (0.00012345, 1.0), (0.0000012345, 0.00042)]
    for loss, precision in rows:
        console.evaluation(1, {"loss": loss, "AP": precision, "top1": precision}, 360)
    lines = out.getvalue().splitlines()
    assert lines[2] == "evaluation after epoch 1  loss 0.009902   AP 0.910   top-1 91.00%   360 samples"
    assert {(line.index("AP"), line.index("top-1"), len(line)) for line in lines} == {(42, 53, len(lines[0]))}


def test_a_block_has_its_facts_aligned() -> None:
    out = io.StringIO()
    Console(out, False).block("done in 21 s", {"weights": "a", "none": "", "next": "b\nc"})
    assert out.getvalue() == "done in 21 s\n  weights  a\n  next     b\n           c\n"


def test_a_stream_that_knows_only_ascii_gets_an_ascii_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    raw, clock = io.BytesIO(), Clock()
    stream = io.TextIOWrapper(raw, "ascii")
    _train(Console(stream, True, clock), clock, num_epochs=1, epoch_steps=20, step_s=1.0)
    assert b"#" in raw.getvalue()


def test_a_terminal_without_abilities_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        clock = Clock()
        _train(Console(stream, now=clock), clock, num_epochs=1, epoch_steps=1, step_s=1.0)
        shown = os.read(master, 1000)
    os.close(master)
    assert shown.startswith(b"epoch 1/1  step 1/1")
    assert b"\x1b" not in shown


def test_a_reader_that_goes_away_does_not_stop_the_run() -> None:
    program = """
        import sys, time
        from lockstep.report.console import Console
        console = Console(sys.stdout)
        for line in range(2000):
            console.say("a line " * 20)
        print("went on", file=sys.stderr)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "went on" in errors
