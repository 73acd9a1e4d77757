"""The page: one HTML file with its style, script, images and data, which opens without a server or a network.

Two barriers keep texts of strangers from acting: the templates escape each text where they write it, and the page's
Content Security Policy allows only the one script and the one style whose hashes it names, and no request at all.
"""

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from samebits.config.describe import show
from samebits.errors import CheckpointError, cannot_write_result
from samebits.plain_file import read_plain
from samebits.report.chart import NUM_COLORS, ChartLine, chart, mean_line, templates
from samebits.report.format import clock, counted, duration, metric_name, metric_value, share
from samebits.run_views.compare import SECTIONS, Comparison, compare, metric_names
from samebits.run_views.history import RunHistory
from samebits.run_views.page.sections import Budget, run_values
from samebits.run_views.table import (
    TITLE,
    cut,
    group_by_setting,
    seed_cells,
    setting_text,
    step_text,
    when,
)
from samebits.storage.run_folder import check_target, write_atomically
from samebits.version import __version__

# Fill the templates of pages.


def render(template: str, **values: Any) -> str:
    """Return a template of this folder with values filled in.

    Raises:
        jinja2.UndefinedError: The template uses a value that is not given.
    """
    return _environment().get_template(f"{template}.j2").render(values)


@cache
def _environment() -> Environment:
    environment = templates("samebits.run_views.page")
    # NaN is no JSON: the browser would refuse all data of the page.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    used = (clock, counted, cut, duration, metric_name, metric_value, share, show, step_text, when)
    environment.filters |= {each.__name__: each for each in used}
    environment.filters |= {
        "grouped": lambda number: f"{number:,}",
        "at_minute": lambda seconds: f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}",
        "at_second": lambda seconds: f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}",
        "sha256_base64": lambda text: base64.b64encode(
            hashlib.sha256(text.encode()).digest()
        ).decode(),
    }
    return environment


# Write a page, and never over a file that this command did not write.


_MARK = b"<!-- samebits page, sha256 "


def check_page(path: Path) -> None:
    """Check that a page can be written, before the work.

    Raises:
        CheckpointError: It cannot, or another file has this name.
    """
    check_target(path, is_page)


def is_page(path: Path) -> bool:
    """Return whether a file is a page that Samebits wrote and the user has not edited: it ends with its SHA-256."""
    try:
        if path.is_symlink():
            return False
        content, _, last = read_plain(path).rpartition(_MARK)
    except OSError:
        return False
    return last == _end_of(content).removeprefix(_MARK)


def _end_of(content: bytes) -> bytes:
    return _MARK + hashlib.sha256(content).hexdigest().encode() + b" -->\n"


def write_page(page: str, path: Path) -> None:
    """Write a page, whole or not at all. Raises CheckpointError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = page.encode()
        write_atomically(path, content + _end_of(content))
    except (OSError, CheckpointError) as error:
        reason = error.__context__ if isinstance(error, CheckpointError) else error
        if not isinstance(reason, OSError):
            raise
        raise cannot_write_result(path, reason) from None


GENERATOR = "samebits report"
MAX_PICTURE_BYTES = 3_500_000  # of all images of a page, as text


def report_page(runs: Sequence[RunHistory]) -> str:
    """Return the page on one or several runs."""
    budget = Budget(MAX_PICTURE_BYTES)
    shown = [run_values(run, budget) for run in runs]
    if len(runs) == 1:
        return _page(runs[0].name, shown)
    return _page(f"{len(runs)} runs", shown, compare(runs))


def comparison_charts(comparison: Comparison, legends: Sequence[str]) -> list[dict[str, Any]]:
    """Return the charts that have a line for each run, with these legends; of several seeds, one for each setting."""
    by_path = {run.summary.path: run for run in comparison.runs}
    groups = group_by_setting([run.summary for run in comparison.runs])
    if len(comparison.runs) < 3 or sum(len(each.paths) for each in groups) < len(comparison.runs):
        groups = []  # two curves are clearer, and some runs are not complete or have the same seed
    curves = [
        ("eval", name, f"Validation {metric_name(name)}")
        for name in metric_names(comparison.runs)[:8]
    ]
    drawn = []
    for kind, name, title in [
        *curves,
        ("train", "loss", "Training loss"),
        ("train", "lr", "Learning rate"),
    ]:
        lines = [
            mean_line(
                [by_path[path].curves.get(kind, name) for path in group.paths],
                f"{setting_text(group)}mean of {len(group.paths)}",
                index,
            )
            for index, group in enumerate(groups)
        ] or [
            ChartLine(run.curves.get(kind, name), legend, index % NUM_COLORS, index >= NUM_COLORS)
            for index, (run, legend) in enumerate(zip(comparison.runs, legends, strict=True))
        ]
        drawn.append(chart(title, name, lines, starts_at_zero=name == "lr"))
    return [each for each in drawn if each is not None]


def _page(
    title: str,
    runs: Sequence[Any],
    comparison: Comparison | None = None,
) -> str:
    charts = []
    groups = []
    if comparison is not None:
        charts = comparison_charts(comparison, comparison.legends)
        groups = group_by_setting([run.summary for run in comparison.runs])
    # In the order of the page.
    every = [*charts, *(each for run in runs for name in ("curves", "speed") for each in run[name])]
    style, script = (
        files("samebits.run_views.page").joinpath(name) for name in ("page.css", "page.js")
    )
    return render(
        "page.html",
        title=title,
        runs=runs,
        comparison=comparison,
        sections=SECTIONS,
        charts=charts,
        seeds=seed_cells(groups) if groups else None,
        seeds_title=f"By setting: {TITLE}",
        generator=f"{GENERATOR} {__version__}",
        version=__version__,
        now=datetime.now().timestamp(),
        style=Markup(style.read_text(encoding="utf-8")),
        script=Markup(script.read_text(encoding="utf-8")),
        data=[each["data"] for each in every],
    )
