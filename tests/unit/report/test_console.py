import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from rich.table import Table

from samebits.errors import ConfigError
from samebits.report.console import Console
from samebits.report.format import counted


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def plain(text: str) -> str:
    """A text without the sequences that style it or move the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


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
            epoch=(step - 1) // epoch_steps + 1, num_epochs=num_epochs, steps_per_epoch=epoch_steps, step=step,
            num_steps=num_steps, loss=1 / step, samples_per_s=9812.3, left_s=(num_steps - step) * step_s,
        )  # fmt: skip


def test_a_log_file_gets_a_line_for_each_tenth_of_an_epoch() -> None:
    out, clock = io.StringIO(), Clock()
    _train(Console(out, False, clock), clock, num_epochs=2, epoch_steps=1000, step_s=0.1)
    lines = out.getvalue().splitlines()
    assert lines[0] == "epoch 1/2  step 1/2,000  loss 1.000      9,812 samples/s  3:20 left"
    assert 19 <= len(lines) <= 21
    assert not any("\x1b" in line or "\r" in line for line in lines)


@pytest.mark.parametrize(
    ("run", "num_lines"),
    [
        ({"num_epochs": 10, "epoch_steps": 23, "step_s": 0.04}, range(4)),
        ({"num_epochs": 1, "epoch_steps": 100_000, "step_s": 1.0}, range(1600, 1671)),
    ],
    ids=["quick: few", "slow: one each minute"],
)
def test_a_log_file_gets_lines_by_the_time(run: dict[str, Any], num_lines: range) -> None:
    out, clock = io.StringIO(), Clock()
    _train(Console(out, False, clock), clock, **run)
    assert len(out.getvalue().splitlines()) in num_lines


def test_a_terminal_gets_one_line_that_is_redrawn_at_most_four_times_a_second() -> None:
    out, clock = io.StringIO(), Clock()
    _train(Console(out, True, clock), clock, num_epochs=2, epoch_steps=50, step_s=0.0625)
    assert "\n" not in out.getvalue()
    assert 25 <= plain(out.getvalue()).count("epoch ") <= 26


def test_how_much_is_done_is_shown_on_a_terminal_only() -> None:
    for interactive in (True, False):
        out, clock = io.StringIO(), Clock()
        console = Console(out, interactive, clock)
        for done in range(1, 101):
            console.share_done("evaluating", done, 100)
        console.close()
        assert out.getvalue().count("evaluating") == (2 if interactive else 0)
        assert ("100/100" in out.getvalue()) == interactive


@pytest.mark.parametrize(
    "columns", [20, 80, *(pytest.param(columns, marks=pytest.mark.full) for columns in (40, 60, 200))]
)
def test_the_line_of_progress_is_never_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    out, clock = io.StringIO(), Clock()
    _train(Console(out, True, clock), clock, num_epochs=10, epoch_steps=469, step_s=0.5)
    drawn = plain(out.getvalue()).split("\r")
    assert max(map(len, drawn)) <= columns - len("^C^C")  # which the terminal writes behind it at Ctrl-C
    assert all("left" in line for line in drawn if line and columns >= 40)
    assert any("━" in line for line in drawn) or columns < 80


def test_a_wide_terminal_shows_how_much_of_the_epoch_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out, clock = io.StringIO(), Clock()
    _train(Console(out, True, clock), clock, num_epochs=10, epoch_steps=8, step_s=0.5)
    assert "epoch 3/10 75%  " in plain(out.getvalue())
    assert "22/80  loss 0.04545  9,812 samples/s  0:29 left" in plain(out.getvalue())


@pytest.mark.parametrize(("columns", "is_shown"), [(100, False), (120, True)])
def test_a_wide_terminal_shows_waits_for_data(columns: int, is_shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    done = {"epoch": 10, "num_epochs": 100, "step": 900, "num_steps": 10_000, "left_s": 4000.0}
    Console(out, True, Clock()).progress(
        **done, steps_per_epoch=100, loss=0.04545, samples_per_s=12_345.0, data_wait=0.034
    )
    assert ("12,345 samples/s  data wait 3.4%  1:06:40 left" in plain(out.getvalue())) == is_shown
    assert "━" in plain(out.getvalue())


def test_messages_are_above_the_progress_line() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(out, True, clock)
    _train(console, clock, num_epochs=1, epoch_steps=1, step_s=1.0)
    before = out.getvalue()
    console.say("restart 1 of 3")
    added = out.getvalue()[len(before) :]
    assert added.startswith("\r\x1b[2Krestart 1 of 3\n")
    assert added.endswith("0:00 left")
    console.close()
    assert out.getvalue().endswith("\x1b[2K")
    assert "\x1b[?25" not in out.getvalue()  # a killed process could not show the cursor again


def test_nouns_are_counted() -> None:
    texts = [counted(2, noun) for noun in ("process", "micro-batch", "epoch", "thread")]
    assert texts == ["2 processes", "2 micro-batches", "2 epochs", "2 threads"]
    assert (counted(1, "process"), counted(1024, "epoch")) == ("1 process", "1,024 epochs")


def test_a_terminal_and_a_log_file_name_the_figures_of_a_validation_alike() -> None:
    for is_terminal in (True, False):
        out = io.StringIO()
        console = Console(out, is_terminal)
        console.evaluation(1, {"loss": 0.8721, "top1": 0.91944, "top1/7": 0.5}, 1.4142, is_best=True)
        console.evaluation(2.5, {"loss": 0.3144, "top1": 0.5, "top1/7": 1.0})
        assert plain(out.getvalue()).splitlines() == [
            "epoch 1  train loss 1.414      validation loss 0.8721     top-1 91.94%   best",
            "epoch 2.50  train loss -          validation loss 0.3144     top-1 50.00%",
        ]


def test_a_log_file_names_the_figures_of_a_validation_and_has_the_facts_of_a_block_aligned() -> None:
    out = io.StringIO()
    console = Console(out, False)
    console.evaluation(2.5, {"loss": float("nan"), "top1": 0.5}, 0.25, is_best=True)
    console.evaluation(1, {"AP": 0.5, "APL": -1.0})  # an average over no ground truth
    console.block("done in 21 s", {"weights": "a", "none": "", "next": "b\nc"})
    first, second, *block = out.getvalue().splitlines()
    assert first == "epoch 2.50  train loss 0.2500     validation loss nan        top-1 50.00%   best"
    assert "APL none" in second
    assert block == ["done in 21 s", "  weights  a", "  next     b", "           c"]


def test_figures_of_a_log_file_stand_below_each_other() -> None:
    out = io.StringIO()
    console = Console(out, False)
    rows = [(2.302585, 0.0), (0.8721, 0.009902), (0.009902, 0.91), (0.00012345, 1.0), (0.0000012345, 0.00042)]
    for loss, precision in rows:
        console.evaluation(1, {"loss": loss, "AP": precision, "top1": precision})
    lines = out.getvalue().splitlines()
    assert lines[2].endswith("validation loss 0.009902   AP 0.910   top-1 91.00%")
    assert {(line.index("AP"), line.index("top-1")) for line in lines} == {(58, 69)}


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_a_block_fills_the_terminal_but_for_what_is_copied(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    Console(out, True).block("done", {"data": "word " * 40, "next": f"samebits eval {'x' * 120}"}, whole=["next"])
    *wrapped, copied = plain(out.getvalue()).splitlines()
    assert columns - 10 < max(map(len, wrapped)) <= columns
    assert copied == f"  next  samebits eval {'x' * 120}"


def test_markup_and_escapes_of_others_have_no_effect() -> None:
    for interactive in (True, False):
        out = io.StringIO()
        console = Console(out, interactive)
        console.say("[bold red]a[/] \x1b[31mb :smile: 'c' 12")
        console.block("[b]d", {"[i]e": "[link=x]f\x07"})
        console.evaluation(1, {"[u]g": 1.0})
        rows = Table.grid()
        rows.add_row("[blink]h")
        console.draw(rows)
        shown = plain(out.getvalue())
        for text in ("[bold red]a[/] \\x1b[31mb :smile: 'c' 12", "[b]d", "[i]e", "[link=x]f\\x07", "[u]g", "[blink]h"):
            assert text in shown


def test_with_no_color_a_terminal_gets_no_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", ""):  # an empty one does not count: no-color.org
        monkeypatch.setenv("NO_COLOR", value)
        out, clock = io.StringIO(), Clock()
        console = Console(out, True, clock)
        console.block("head", {"a": "b"})
        console.evaluation(1, {"top1": 1.0}, is_best=True)
        _train(console, clock, num_epochs=1, epoch_steps=2, step_s=1.0)
        console.error(ConfigError("no", where="there"))
        console.close()
        assert (re.search(r"\x1b\[[0-9;]*m", out.getvalue()) is None) == bool(value)


def test_a_table_in_a_file_is_80_columns_wide_and_has_no_blanks_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = io.StringIO()
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_row("ok", "word " * 30)
    Console(out, False).draw(rows)
    lines = out.getvalue().splitlines()
    assert 70 < max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]


def test_an_error_has_the_same_text_on_a_terminal_as_in_a_file() -> None:
    error = ConfigError(f"a{'b' * 100} is not a setting", given="c\nd", where="e [red]f")
    out = io.StringIO()
    Console(out, True).error(error)
    assert plain(out.getvalue()) == f"{error}\n"
    assert "\x1b[1;31mconfig error:" in out.getvalue()


def test_sentences_of_an_error_break_between_words_and_what_users_copy_stays_whole() -> None:
    command = f"Run it with a checkpoint: samebits train --run-dir {'demo ' * 15}"
    error = ConfigError(
        "optim.warmup_epochs (2) is more than epochs (1), so the learning rate would never reach its peak",
        given="a b " * 30,
        cause="so long " * 12,
        fix=f"{'Set it. ' * 12}\n{command}",
    )
    out = io.StringIO()
    Console(out, True).error(error)
    assert plain(out.getvalue()).splitlines() == [
        "config error: optim.warmup_epochs (2) is more than epochs (1), so the learning",
        "    rate would never reach its peak",
        f"  given  {'a b ' * 30}",
        f"  cause  {' '.join(['so long'] * 9)}",
        f"         {' '.join(['so long'] * 3)}",
        f"  fix    {' '.join(['Set it.'] * 9)}",
        f"         {' '.join(['Set it.'] * 3)}",
        f"         {command}",
    ]


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "latin-1"])
def test_a_terminal_that_is_not_utf_8_gets_an_ascii_bar(encoding: str) -> None:
    raw, clock = io.BytesIO(), Clock()
    stream = io.TextIOWrapper(raw, encoding)
    _train(Console(stream, True, clock), clock, num_epochs=1, epoch_steps=20, step_s=1.0)
    assert "epoch 1/1  -----" in plain(raw.getvalue().decode("ascii"))


@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_a_terminal_without_abilities_gets_plain_lines(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
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
        from samebits.report.console import Console
        console = Console(sys.stdout)
        for line in range(2000):
            console.say("a line " * 20)
        print("went on", file=sys.stderr)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "went on" in errors
