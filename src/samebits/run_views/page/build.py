"""The page: one HTML file with its style, script, images and data, which opens without a server or a network.

Two barriers keep texts of strangers from acting: the templates escape each text where they write it, and the page's
Content Security Policy allows only the one script and the one style whose hashes it names, and no request at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from samebits.report.format import clock, metric_name, metric_value
from samebits.run_views.compare import SECTIONS, Comparison, compare, metric_names
from samebits.run_views.history import RunHistory
from samebits.run_views.page.chart import NUM_COLORS, ChartLine, chart
from samebits.run_views.page.pictures import Budget
from samebits.run_views.page.render import render
from samebits.run_views.page.sections import run_values
from samebits.run_views.repeats import TITLE, group_by_setting, seed_cells
from samebits.run_views.summary import RunSummary
from samebits.version import __version__

GENERATOR = "samebits report"
MAX_PICTURE_BYTES = 3_500_000  # of all images of a page, as text


def report_page(runs: Sequence[RunHistory]) -> str:
    """Return the page on one or several runs."""
    budget = Budget(MAX_PICTURE_BYTES)
    shown = [run_values(run, budget) for run in runs]
    if len(runs) == 1:
        return _page(runs[0].name, shown)
    return _page(f"{len(runs)} runs", shown, compare(runs))


@dataclass(frozen=True)
class SweepRow:
    """A trial of a sweep, as a row of its table."""

    summary: RunSummary  #: Its run.
    values: Sequence[str]  #: The settings in which it differs from others, in the order of the columns.


def sweep_page(name: str, keys: Sequence[str], rows: Sequence[SweepRow], runs: Sequence[RunHistory]) -> str:
    """Return the page on a sweep."""
    states = [row.summary.state for row in rows]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    metric = next((row.summary.monitor for row in rows if row.summary.monitor), "")
    names = [metric, *(["loss"] if metric != "loss" and any("loss" in row.summary.metrics for row in rows) else [])]

    def cells(row: SweepRow) -> list[str]:
        run = row.summary
        metrics = [metric_value(name, run.metrics[name]) if name in run.metrics else "" for name in names]
        return [*row.values, *metrics, f"{run.step:,}", clock(run.took_s) if run.took_s is not None else ""]

    sweep = {
        "note": f"Sweep of {len(rows)} trials: {counted}",
        "heads": ("trial", "state", *keys, *map(metric_name, names), "step", "took", "SHA-256"),
        "rows": [(row.summary, cells(row)) for row in rows],
        "best": f"Curves and values of the {len(runs)} best trials." if 1 < len(runs) < len(rows) else "",
    }
    seeds = _seeds([row.summary for row in rows])
    return _page(name, [], compare(runs) if len(runs) > 1 else None, {**sweep, "seeds": seeds})


def comparison_charts(comparison: Comparison, legends: Sequence[str]) -> list[dict[str, Any]]:
    """Return the charts that have a line for each run, with these legends."""
    curves = [("eval", name, f"Validation {metric_name(name)}") for name in metric_names(comparison.runs)[:8]]
    drawn = []
    for kind, name, title in [*curves, ("train", "loss", "Training loss"), ("train", "lr", "Learning rate")]:
        lines = [
            ChartLine(run.curves.get(kind, name), legend, index % NUM_COLORS, index >= NUM_COLORS)
            for index, (run, legend) in enumerate(zip(comparison.runs, legends, strict=True))
        ]
        drawn.append(chart(title, name, lines, starts_at_zero=name == "lr"))
    return [each for each in drawn if each is not None]


def _seeds(runs: Sequence[RunSummary]) -> dict[str, Any] | None:
    groups = group_by_setting(runs)
    return {"title": f"By setting: {TITLE}", "cells": seed_cells(groups)} if groups else None


def _page(
    title: str, runs: Sequence[Any], comparison: Comparison | None = None, sweep: dict[str, Any] | None = None
) -> str:
    compared: dict[str, Any] | None = None
    if comparison is not None:
        named = zip(comparison.letters, comparison.runs, strict=True)
        compared = {
            "heads": ["", *(f"{letter} {run.name}" for letter, run in named)],
            "num_equal": comparison.num_equal,
            "sections": {name: comparison.section(name) for name in SECTIONS},
            "charts": comparison_charts(comparison, comparison.legends),
            "seeds": _seeds([run.summary for run in comparison.runs]),
        }
    charts = [*(compared["charts"] if compared else ())]  # in the order of the page
    charts += [each for run in runs for name in ("curves", "speed") for each in run[name]]
    style, script = (files("samebits.run_views.page").joinpath(name) for name in ("page.css", "page.js"))
    return render(
        "page.html",
        title=title,
        runs=runs,
        letters=comparison.letters if comparison is not None else [],
        comparison=compared,
        sweep=sweep,
        generator=f"{GENERATOR} {__version__}",
        version=__version__,
        now=datetime.now().timestamp(),
        style=Markup(style.read_text(encoding="utf-8")),
        script=Markup(script.read_text(encoding="utf-8")),
        data=[each["data"] for each in charts],
    )
