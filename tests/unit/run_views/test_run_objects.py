"""`samebits.runs` and `samebits.Run`: run folders as objects, shown in notebooks, whoever wrote the folders."""

import json
import re
import sys
from pathlib import Path

import pytest

import samebits
from samebits.errors import ConfigError
from tests.unit.run_views.folders import make_run
from tests.unit.run_views.hostile import HOSTILE, poison
from tests.unit.run_views.test_hostile_folders import Checked

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
