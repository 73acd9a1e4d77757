"""Damaged run folders, and those of strangers: no name acts, no file blocks, and what is whole is read."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest

import samebits
from samebits.cli.main import run as run_command
from samebits.errors import SamebitsError
from samebits.provenance.run_files import RunFiles
from samebits.run_views.history import read_history
from samebits.run_views.page.build import report_page
from samebits.run_views.summary import read_summary
from tests.damage import DAMAGE
from tests.unit.run_views.folders import launcher_line, log_line, make_run, png
from tests.unit.run_views.hostile import HOSTILE, poison

TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "footer", "h1", "h2", "h3", "p", "b", "i",
    "span", "div", "section", "figure", "figcaption", "svg", "text", "line", "polyline", "path", "rect", "g",
    "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "code", "img", "a", "nav", "script",
}  # fmt: skip


class Checked(HTMLParser):
    """Collects what a page contains."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_texts_become_text_of_the_page(tmp_path: Path) -> None:
    runs = [poison(make_run(tmp_path / str(number)), text) for number, text in enumerate(HOSTILE)]
    assert len(runs) >= 50
    for run in runs[::5]:
        check_page(report_page([read_history(run)]))
    page = report_page([read_history(run) for run in runs[:20]])
    found = check_page(page)
    assert "<script>alert(1)</script>" in found.text  # shown, as text


def check_page(page: str) -> Checked:
    found = Checked()
    found.feed(page)
    assert set(found.tags) <= TAGS
    assert found.tags.count("script") == 2
    assert found.tags.count("style") == found.tags.count("body") == 1
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("style", "srcdoc", "srcset")]
    links = [value for name, value in found.attributes if name in ("href", "src", "action", "xlink:href")]
    assert all(link.startswith(("#run-", "data:image/")) for link in links)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    page.encode()  # no half characters
    return found


@pytest.mark.parametrize("command", ["runs", "compare", "watch"])
def test_hostile_texts_do_not_act_on_a_terminal(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [poison(make_run(tmp_path / "runs" / str(number)), text) for number, text in enumerate(HOSTILE[::6])]
    paths = [str(run) for run in runs[:4]]
    arguments = {"runs": [str(tmp_path / "runs"), "--sort", "model.name"], "compare": paths, "watch": paths[:1]}
    run_command([command, *arguments[command]])
    out = capsys.readouterr()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", out.out + out.err)


def test_a_folder_name_of_control_characters_is_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs" / "a\x1b[2Jb\nc")
    os.rename(make_run(tmp_path / "runs" / "d"), os.fsencode(tmp_path / "runs") + b"/d\xff")
    assert run_command(["runs", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "a\\x1b[2Jb\\nc" in out
    assert "d\\udcff" in out
    assert run_command(["runs", str(tmp_path / "runs"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_files_that_block_or_never_end_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    for name in ("metrics.jsonl", "result.json", "logs/rank-0.log", "checkpoints/best.json", "run.lock"):
        (run / name).unlink()
        os.mkfifo(run / name)
    (run / "environment.json").unlink()
    (run / "environment.json").symlink_to("/dev/zero")
    (run / "pictures").mkdir()
    os.mkfifo(run / "pictures/worst.png")
    (run / "pictures/other.png").symlink_to("/dev/zero")
    history = read_history(run)
    assert (history.summary.step, history.summary.recipe) == (0, "mnist")
    assert "could not be read" in report_page([history])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b"\xff\xfe\n" * 1000),
        ("metrics.jsonl", b'{"kind": "train", "step": 1e400, "epoch": NaN, "loss": 1}\n' * 3),
        ("metrics.jsonl", b'{"kind": "train", "step": -5, "epoch": -1, "loss": ' + b"9" * 4000 + b"}\n"),
        ("metrics.jsonl", b'{"kind": "eval", "step": 3, "epoch": 1e308, "loss": -1e308, "top1": 1e308}\n' * 3),
        ("metrics.jsonl", b"x" * 5_000_000),
        ("metrics.jsonl", b'{"kind": "train", "step": 1, "epoch": 0, "loss": 0}\n' * 2),
        ("metrics.jsonl", b"[" * 200_000 + b"\n"),
        ("result.json", b"[" * 200_000),
        ("result.json", b'{"metrics": [], "seconds": {"all": -1e300, "training": 1e300}, "worlds": {"a": 1}}'),
        ("result.json", b'{"metrics": {"top1": "x"}, "best": {"metric": 7}, "worlds": [3, {"size": []}]}'),
        ("config.yaml", b"a: &a [*a]\n"),
        ("config.yaml", b"a: " + b"[" * 3000),
        ("environment.json", b'{"worlds": 3, "world": [], "command": "x", "name": ["a"], "num_cores": -1}'),
        ("dataset_info.json", b'{"classes": [1, {}, null]}'),
        ("provenance.json", b'{"predicate": {"buildDefinition": []}}'),
        ("pictures/confusion.png", b""),
        ("pictures/confusion.png", b"GIF89a" + bytes(40)),
        ("pictures/worst.png", png()[:40]),
        ("pictures/worst.png", png()[:16] + b"\xff" * 8),
        ("pictures/worst.png", b"<svg onload=alert(1)>"),
        ("logs/launcher.log", b"9999-99-99 99:99:99 launch error: x\n" * 10),
        ("run.lock", b"process 99999999999999999999 on x"),
    ],
)  # fmt: skip
def test_damaged_files_neither_stop_a_view_nor_enter_a_page(tmp_path: Path, name: str, content: bytes) -> None:
    run = make_run(tmp_path / "a", is_complete=name == "result.json")
    (run / "pictures").mkdir()
    (run / name).write_bytes(content)
    read_summary(run)
    check_page(report_page([read_history(run), read_history(make_run(tmp_path / "b"))]))
    assert run_command(["compare", str(run), str(tmp_path / "b")]) == 0


def test_a_large_record_file_takes_little_memory_and_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", done_epochs=0)
    names = ", ".join(f'"m{index}": 1.0' for index in range(40))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(5_000):
            file.write(f'{{"kind": "train", "step": {step}, "epoch": {step / 100}, "x{step}": 1.0, {names}}}\n')
    history = read_history(run)
    assert len(history.curves.by_name) <= 200
    assert max(len(curve) for curve in history.curves.by_name.values()) <= 2000
    assert len(report_page([history])) < 2_000_000


def test_logs_of_strangers_are_read_up_to_a_limit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    entry = launcher_line(1, "launch error: " + "x" * 3000 + "\n" + "y\n" * 50)
    (run / "logs/launcher.log").write_text("".join(entry.replace("x", f"x{index}", 1) for index in range(2000)))
    (run / "logs/rank-0.log").write_text(log_line(2, "WARNING", "z" * 100_000) * 20)
    page = report_page([read_history(run)])
    assert len(page) < 2_500_000


FILES = ("config.yaml", "config.diff.yaml", "environment.json", "metrics.jsonl", "result.json", "checkpoints/best.json",
         "provenance.json", "dataset_info.json", "run.lock", "logs/rank-0.log", "logs/launcher.log")  # fmt: skip


STRICT = ("settings", "result", "environment", "best", "worlds", "evaluations")


def problem_of(read: Callable[[], object]) -> SamebitsError | None:
    try:
        read()
    except SamebitsError as error:
        return error
    return None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_ends_no_view_and_is_named_where_it_is_needed(tmp_path: Path, name: str, damage: str) -> None:
    run = make_run(tmp_path / "a")
    whole = read_summary(run)
    DAMAGE[damage](run / name)
    history = read_history(run)
    assert read_summary(run).path == whole.path
    assert "<h1>a</h1>" in report_page([history])
    if name not in ("config.yaml", "environment.json", "result.json"):
        assert (history.summary.metrics, history.summary.weights_sha256) == (whole.metrics, whole.weights_sha256)
    if (run / "config.yaml").exists():
        json.dumps(samebits.Run.load(run).summary.to_plain(), default=str)
    strict, tolerant = RunFiles(run), RunFiles(run, is_tolerant=True)
    for each in STRICT:
        if problem := problem_of(partial(getattr, strict, each)):
            assert str(run) in str(problem)
            assert problem.slots["fix"]
        if each not in ("best", "evaluations"):
            assert getattr(tolerant, each) is not None
    assert all(isinstance(record, dict) for record in tolerant.records())
