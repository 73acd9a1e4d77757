"""The page: one HTML file with its style, script, images and data, which opens without a server or a network.

Two barriers keep texts of strangers from acting: `markup` escapes each text when an element is made, and the page's
Content Security Policy allows only the one script and the one style whose hashes it names, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any

from samebits.errors import printable
from samebits.report.format import clock, metric_name, metric_value
from samebits.run_views.compare import SECTIONS, ComparedValue, Comparison, compare, metric_names
from samebits.run_views.compare_table import letters_of
from samebits.run_views.history import RunHistory
from samebits.run_views.page.chart import NUM_COLORS, ChartLine
from samebits.run_views.page.markup import Child, Markup, element, joined, section, table
from samebits.run_views.page.pictures import Budget
from samebits.run_views.page.sections import ChartSet, run_sections
from samebits.run_views.summary import RunSummary
from samebits.version import __version__

GENERATOR = "samebits report"
MAX_PICTURE_BYTES = 3_500_000  # of all images of a page, as text


def report_page(runs: Sequence[RunHistory]) -> str:
    """Return the page on one or several runs."""
    charts, budget = ChartSet(), Budget(MAX_PICTURE_BYTES)
    if len(runs) == 1:
        run = runs[0]
        body = [_title(run.name, run), *run_sections(run, charts, budget)]
        return _document(run.name, body, charts)
    body = [_title(f"{len(runs)} runs"), _links(runs), *_compared(compare(runs), charts)]
    for index, run in enumerate(runs):
        body.append(element("h2", {"id": f"run-{index}"}, f"{letters_of(len(runs))[index]}  {run.name}"))
        body += [_origin(run), *run_sections(run, charts, budget)]
    return _document(f"{len(runs)} runs", body, charts)


@dataclass(frozen=True)
class SweepRow:
    """A trial of a sweep, as a row of its table.

    Attributes:
        summary: Its run.
        values: The settings in which it differs from others, in the order of the columns.
    """

    summary: RunSummary
    values: Sequence[str]


def sweep_page(name: str, keys: Sequence[str], rows: Sequence[SweepRow], runs: Sequence[RunHistory]) -> str:
    """Return the page on a sweep.

    Args:
        name: Its name.
        keys: Names of the settings that differ between trials.
        rows: All trials, best first.
        runs: The trials whose curves and values are compared, best first.
    """
    charts = ChartSet()
    states = [row.summary.state for row in rows]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    compared = _compared(compare(runs), charts) if len(runs) > 1 else []
    note = f"Curves and values of the {len(runs)} best trials." if len(runs) < len(rows) and compared else None
    body = [
        _title(name),
        element("p", {"class": "soft"}, f"Sweep of {len(rows)} trials: {counted}"),
        section("Trials", _trials(keys, rows)),
        element("p", {"class": "soft"}, note) if note else None,
        *compared,
    ]
    return _document(name, body, charts)


def _trials(keys: Sequence[str], rows: Sequence[SweepRow]) -> Markup:
    monitors = {row.summary.monitor for row in rows if row.summary.monitor}
    metric = next(iter(monitors), "")
    names = [metric, *(["loss"] if metric != "loss" and any("loss" in row.summary.metrics for row in rows) else [])]
    heads = ("trial", "state", *keys, *map(metric_name, names), "step", "took", "SHA-256")
    cells: list[tuple[Child, ...]] = []
    for row in rows:
        run = row.summary
        values = [metric_value(name, run.metrics[name]) if name in run.metrics else "" for name in names]
        took = clock(run.took_s) if run.took_s is not None else ""
        state = element("span", {"class": f"state {run.state}"}, run.state)
        sha256 = element("code", None, run.weights_sha256[:8])
        cells.append((run.name, state, *row.values, *values, f"{run.step:,}", took, sha256))
    return table(cells, heads)


def comparison_page(comparison: Comparison) -> str:
    """Return the page of `samebits compare --html`."""
    charts = ChartSet()
    body = [_title(f"{len(comparison.runs)} runs compared"), *_compared(comparison, charts)]
    return _document(f"{len(comparison.runs)} runs compared", body, charts)


def _compared(comparison: Comparison, charts: ChartSet) -> list[Markup | None]:
    runs = comparison.runs
    drawn = []
    curves = [("eval", name, f"Validation {metric_name(name)}") for name in metric_names(runs)[:8]]
    for kind, name, title in [*curves, ("train", "loss", "Training loss"), ("train", "lr", "Learning rate")]:
        lines = [
            ChartLine(run.curves.get(kind, name), f"{letter} {run.name}", index % NUM_COLORS, index >= NUM_COLORS)
            for index, (run, letter) in enumerate(zip(runs, letters_of(len(runs)), strict=True))
        ]
        drawn.append(charts.add(title, name, lines, starts_at_zero=name == "lr"))
    found = [each for each in drawn if each is not None]
    return [
        section("Values", _values(comparison)),
        section("Curves", element("div", {"class": "charts"}, found) if found else None),
    ]


def _values(comparison: Comparison) -> Markup:
    letters = letters_of(len(comparison.runs))
    heads = ["", *(f"{letter} {run.name}" for letter, run in zip(letters, comparison.runs, strict=True))]
    rows: list[Markup] = []
    for name in SECTIONS:
        found = comparison.section(name)
        note = f"{name}: {comparison.num_equal} equal{'' if found else ', none differ'}" if name == "settings" else name
        if found or name == "settings":
            rows.append(element("tr", {"class": "group"}, element("th", {"colspan": len(heads)}, note)))
        rows += [_compared_row(row) for row in found]
    whole = element(
        "table",
        {"class": "wide"},
        element("thead", None, element("tr", None, [element("th", {"scope": "col"}, head) for head in heads])),
        element("tbody", None, rows),
    )
    return element("div", {"class": "scroll", "tabindex": "0", "role": "group"}, whole)


def _compared_row(row: ComparedValue) -> Markup:
    cells = [
        element("td", {"class": "other" if value != row.values[0] and row.section != "metrics" else None}, value[:400])
        for value in row.values
    ]
    return element("tr", None, element("th", {"scope": "row"}, row.name), cells)


def _title(title: str, run: RunHistory | None = None) -> Markup:
    return element("header", None, element("h1", None, title), _origin(run) if run is not None else None)


def _origin(run: RunHistory) -> Markup:
    started = f", started {datetime.fromtimestamp(run.summary.started):%Y-%m-%d %H:%M}" if run.summary.started else ""
    state = element("span", {"class": f"state {run.summary.state}"}, run.summary.state)
    recipe = run.summary.recipe or "unknown recipe"
    return element("p", {"class": "soft"}, state, f", {recipe}{started}, from {run.summary.path}")


def _links(runs: Sequence[RunHistory]) -> Markup:
    letters = letters_of(len(runs))
    return element(
        "nav",
        {"aria-label": "Runs"},
        [element("a", {"href": f"#run-{index}"}, f"{letters[index]} {run.name}") for index, run in enumerate(runs)],
    )


def _document(title: str, body: Sequence[Markup | None], charts: ChartSet) -> str:
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        None,
        element("meta", {"charset": "utf-8"}),
        # Before everything that it governs.
        element("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        element("meta", {"name": "generator", "content": f"{GENERATOR} {__version__}"}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", {"name": "referrer", "content": "no-referrer"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("title", None, f"{title}, Samebits"),
        Markup(f"<style>{style}</style>"),
    )
    made = f"Made by Samebits {__version__} on {datetime.now():%Y-%m-%d %H:%M}. Times are those of the runs' machines."
    main = element("main", None, body, element("footer", None, made))
    data = Markup(f'<script type="application/json" id="charts">{_json(charts.data)}</script>')
    content = joined([head, element("body", None, main, data, Markup(f"<script>{script}</script>"))])
    return f'<!doctype html>\n<html lang="en">{content}</html>\n'


def _json(value: Any) -> str:
    """Return JSON that cannot end the element around it."""
    plain = json.dumps(_printable(value), allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _printable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def _asset(name: str) -> str:
    return files("samebits.run_views.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
