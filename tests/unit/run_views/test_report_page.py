"""`samebits report` and `samebits.Run`: the page, its size, its own file, and runs as objects."""

import base64
import hashlib
import json
import random
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import samebits
from samebits.cli.main import run as run_command
from samebits.errors import ConfigError
from samebits.run_views.history import read_history
from samebits.run_views.page.build import MAX_PICTURE_BYTES, report_page
from samebits.run_views.page.notebook import figures
from tests.unit.run_views.folders import launcher_line, log_line, make_run, png
from tests.unit.run_views.hostile import HOSTILE, poison
from tests.unit.run_views.test_hostile_folders import Checked


def run_with_faults(run: Path) -> Path:
    """A run that was killed once, restarted, and has pictures."""
    make_run(run)
    (run / "logs/launcher.log").write_text(
        launcher_line(40, "launch error: rank 1 (host vm, pid 7) was killed by signal 9 (SIGKILL)\n  cause  kill -9")
        + launcher_line(40, "restart 1 of 3")
    )
    with (run / "logs/rank-0.log").open("a") as file:
        file.write(log_line(20, "INFO", "evaluation after epoch 1: {'loss': 1.0}"))
        file.write(log_line(41, "ERROR", "ended by RuntimeError\nTraceback\nRuntimeError: Connection reset by peer"))
        file.write(log_line(50, "INFO", "training from step 50 of 150, rank 0 of 2"))
        file.write(log_line(60, "WARNING", "data loading is the bottleneck: 40% of training time waits for it"))
        file.write(log_line(90, "INFO", "complete after step 150"))
    (run / "pictures").mkdir()
    (run / "pictures/worst.png").write_bytes(png(40, 40))
    (run / "pictures/curves.png").write_bytes(png())  # of an earlier version, as the page draws them
    (run / "pictures/confusion.png").write_bytes(png(30, 30))
    return run


def test_a_page_has_each_part_of_a_run(tmp_path: Path) -> None:
    page = report_page([read_history(run_with_faults(tmp_path / "my-run"))])
    assert "<h1>my-run</h1>" in page
    for text in (
        "Validation top-1", "Learning rate", "Gradient norm", "Own work of each rank per step", "Samples per second",
        "Images", "Confusion matrix", "waiting for data", "starts, evaluation, checkpoints, repeated steps",
        "was killed by signal 9", "restart 1 of 3", "data loading is the bottleneck", "1 evaluation, shown",
        "2.15.0", "optim.lr", "chain of all steps", "d" * 64, "samebits verify RUN",
    ):  # fmt: skip
        assert text in page, text
    assert "Connection reset by peer" not in page  # the consequence of a fault that the launcher names
    assert page.count("<img ") == 2


def test_the_policy_allows_the_one_style_and_script_and_no_request(tmp_path: Path) -> None:
    page = report_page([read_history(make_run(tmp_path / "a"))])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (style,), (script,) = (
        re.findall(r"<style>(.*?)</style>", page, re.S),
        re.findall(r"<script>(.*?)</script>", page, re.S),
    )
    for text, name in ((style, "style-src"), (script, "script-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} &#x27;sha256-{digest}&#x27;" in policy
    assert policy.startswith("default-src &#x27;none&#x27;; img-src data:;")
    assert not re.search(r"https?://", page.replace("http-equiv", ""))


def test_a_page_of_100_epochs_is_below_5_mb(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", epochs=100)
    (run / "pictures").mkdir()
    sheet = png(900, 900, random.Random(1).randbytes(900 * 900))
    for number in range(8):
        (run / "pictures" / f"sheet-{number}.png").write_bytes(sheet)
    page = report_page([read_history(run)])
    assert "data:image/webp;base64," in page
    assert "image files could not be read or are too large" in page
    assert MAX_PICTURE_BYTES < 4_000_000
    assert len(page.encode()) < 5_000_000


def test_several_runs_begin_with_their_comparison(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, lr=lr) for name, lr in (("a", 0.1), ("b", 0.3))]
    page = report_page([read_history(run) for run in runs])
    assert page.index("<h1>2 runs</h1>") < page.index("optim.lr") < page.index('id="run-0"') < page.index('id="run-1"')
    assert "a a" in page
    assert "b b" in page


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    page = report_page([read_history(make_run(tmp_path / "a", done_epochs=0))])
    assert "Settings" in page
    assert "<polyline" not in page


@pytest.mark.parametrize(
    "edit", [("</title>", " edited</title>"), ("</html>", "</html><!-- mine -->"), ("-->\n", "-->\nmine")]
)
def test_an_edited_page_is_kept(edit: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = make_run(tmp_path / "a"), tmp_path / "page.html"
    assert run_command(["report", str(run), "--out", str(page)]) == 0
    edited = edit[1].join(page.read_text().rsplit(edit[0], 1))
    page.write_text(edited)
    assert run_command(["report", str(run), "--out", str(page)]) == 5
    assert "did not write it as it is" in capsys.readouterr().err
    assert page.read_text() == edited


def test_the_page_is_in_the_run_folder_and_replaces_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a")
    for _ in range(2):
        assert run_command(["report", str(run)]) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    mine = tmp_path / "mine.html"
    mine.write_text("<!doctype html><p>my own page")
    assert run_command(["report", str(run), "--out", str(mine)]) == 5
    assert mine.read_text() == "<!doctype html><p>my own page"
    assert "already exists" in capsys.readouterr().err
    link = tmp_path / "link.html"
    link.symlink_to(run / "report.html")
    assert run_command(["report", str(run), "--out", str(link)]) == 5
    assert run_command(["report", str(run), "--out", str(tmp_path / "new/folder/x.html")]) == 0
    assert run_command(["report", str(run), str(run)]) == 2
    assert run_command(["report", str(tmp_path)]) == 5
    assert run_command(["report", str(run), "--out", "/proc/x.html"]) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link.html", "mine.html", "new"]


def test_charts_are_svg_files_and_replace_no_user_s_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_run(tmp_path / f"run{number}", lr=0.1 + number / 8)) for number in range(2)]
    out, charts = ["--out", str(tmp_path / "report.html")], tmp_path / "charts"
    assert run_command(["report", *runs, *out, "--svg", str(charts)]) == 0
    names = ["learning-rate.svg", "training-loss.svg", "validation-loss.svg", "validation-top-1.svg"]
    assert sorted(path.name for path in charts.iterdir()) == names
    for path in charts.iterdir():
        assert {"optim.lr=0.1", "optim.lr=0.225"} <= set(ElementTree.parse(path).getroot().itertext())
    assert run_command(["report", runs[0], *out, "--svg", str(charts)]) == 0
    assert (charts / "loss.svg").is_file()
    edited = (charts / "loss.svg").read_text().replace("Loss", "Error")
    (charts / "loss.svg").write_text(edited)
    capsys.readouterr()
    assert run_command(["report", runs[0], *out, "--svg", str(charts)]) != 0
    assert "loss.svg already exists" in capsys.readouterr().err
    assert (charts / "loss.svg").read_text() == edited


@pytest.mark.parametrize("name", ["<script>alert(1)<script>", "a\x00b\x1b]0;x\x07", "..\\x&amp;'\"", "損失"])
def test_names_of_strangers_stay_text_of_an_svg_file(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run")
    records = [{"kind": "eval", "step": step, "epoch": step, name: 0.5, name + "!": 0.5} for step in range(1, 4)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    drawn = figures([read_history(run)])
    assert len(drawn) == 2
    for file, text in drawn.items():
        assert re.fullmatch(r"[a-z0-9-]+\.svg", file)
        tags = {each.tag.rpartition("}")[2] for each in ElementTree.fromstring(text).iter()}
        assert tags <= {"svg", "title", "text", "line", "path", "polyline"}


def test_each_percentage_of_a_metric_has_two_decimals_and_of_time_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", top1=0.5)
    page = report_page([read_history(run)])
    assert {"50.00%", "72.1%"} <= set(re.findall(r">(\d+\.\d+%)<", page))
    data = json.loads(re.search(r'id="charts">(.*?)</script>', page)[1])  # type: ignore[index]
    assert {each["percent"] for each in data} == {0, 1, 2}


TAGS = {
    "table", "thead", "tbody", "tr", "th", "td", "p", "b", "code", "svg", "title", "text", "line", "polyline", "path",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_run(tmp_path / "runs" / "a", lr=0.1, top1=0.7)
    make_run(tmp_path / "runs" / "b", lr=0.3, top1=0.9)
    make_run(tmp_path / "runs" / "c", done_epochs=1)
    return tmp_path / "runs"


def test_runs_are_filtered_and_sorted_as_by_the_command(folder: Path) -> None:
    runs = samebits.runs(folder, sort="top1")
    assert [run.name for run in runs] == ["b", "a", "c"]
    assert [run.name for run in samebits.runs(folder, ["state=done", "optim.lr<0.2"])] == ["a"]
    assert repr(runs) == "RunList(3 runs, 2 done, 1 stopped)"
    assert repr(runs[1:]) == "RunList(2 runs, 1 done, 1 stopped)"
    with pytest.raises(ConfigError, match="no run has a value named topp1"):
        samebits.runs(folder, sort="topp1")
    with pytest.raises(ConfigError, match="can't be read"):
        samebits.runs(folder / "nowhere")


def test_a_run_has_its_state_settings_metrics_and_curves(folder: Path) -> None:
    run = samebits.Run.load(folder / "b")
    assert (run.state, run.settings["optim.lr"], run.metrics) == ("done", 0.3, {"loss": 0.5, "top1": 0.9})
    assert run.weights_sha256 == run.result["weights_sha256"]
    assert run.history.eval["top1"][-1] == 0.9
    assert repr(run) == f"Run('{folder}/b', loss=0.5, top1=0.9, weights_sha256='{run.weights_sha256[:8]}…')"
    stopped = samebits.Run.load(folder / "c")
    assert (stopped.state, stopped.result, stopped.weights_sha256) == ("stopped", {}, "")
    assert stopped.metrics["top1"] == pytest.approx(0.3)
    assert repr(stopped).startswith(f"Run('{folder}/c', stopped at step 50, loss=")
    with pytest.raises(samebits.CheckpointError, match="is not a run folder"):
        samebits.Run.load(folder)


def test_a_metric_that_is_not_finite_stays_in_the_metrics(folder: Path) -> None:
    result = json.loads((folder / "a" / "result.json").read_text())
    result["metrics"] = {"top1": None, "loss": 1.0} | {f"top1/{number}": 0.5 for number in range(1000)}
    (folder / "a" / "result.json").write_text(json.dumps(result))
    metrics = samebits.Run.load(folder / "a").metrics
    assert metrics["top1"] != metrics["top1"]
    assert len(metrics) == 1002


def test_a_frame_has_a_row_for_each_run_and_what_differs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = samebits.runs(folder).rows()
    assert [row["optim.lr"] for row in rows] == [0.1, 0.3, 0.1]
    assert "seed" not in rows[0]
    frame = samebits.runs(folder, sort="top1").frame()
    assert frame["run"].tolist() == ["b", "a", "c"]
    assert frame["started"].dt.year.gt(2000).all()
    assert len(samebits.runs(folder, "state=failed").frame()) == 0
    monkeypatch.setitem(sys.modules, "pandas", None)
    for make in (samebits.runs(folder).frame, samebits.runs(folder)[0].history.frame):
        with pytest.raises(ConfigError, match="needs pandas, which is not installed"):
            make()


def test_a_notebook_shows_a_table_and_a_run_with_its_curves(folder: Path) -> None:
    found = checked(samebits.runs(folder, sort="top1")._repr_html_())
    assert re.search("top-1.*b.*done.*90.00%.*a.*done.*70.00%.*c.*stopped", found.text)
    found = checked(samebits.runs(folder)[0]._repr_html_())
    assert found.tags.count("svg") == 2
    assert found.tags.count("polyline") == 3


def test_hostile_texts_become_text_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in enumerate(HOSTILE):
        poison(make_run(tmp_path / "runs" / f"{number}-<b onclick=alert(1)>"), text)
    runs = samebits.runs(tmp_path / "runs")
    assert len(runs) == len(HOSTILE) >= 50
    checked(runs._repr_html_())
    for run in runs[::4]:
        found = checked(run._repr_html_())
        assert "<b onclick=alert(1)>" in found.text
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", repr(run))


def checked(markup: str) -> Checked:
    found = Checked()
    found.feed(markup)
    assert set(found.tags) <= TAGS
    names = {name for name, _ in found.attributes}
    assert names <= {
        "style", "xmlns", "width", "height", "viewbox", "points", "d", "x", "y", "x1", "x2", "y1", "y2", "text-anchor",
        "font-family", "font-size", "fill", "stroke", "stroke-width", "stroke-linejoin", "stroke-linecap",
    }  # fmt: skip
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", markup)
    markup.encode()  # no half characters
    return found
