"""`samebits report`: one HTML file on one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebits.cli.options import Debug, path_option
from samebits.errors import ConfigError

if TYPE_CHECKING:
    from samebits.run_views.history import RunHistory

MAX_RUNS = 26
MAX_COMPARED = 8  # trials of a sweep
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Run folders, or the folder of a sweep.", show_default=False)
]
Out = Annotated[Path | None, path_option("--out", "FILE", "The HTML file; default: report.html in the run folder.")]

Svg = Annotated[
    Path | None,
    path_option("--svg", "DIR", "Also write each chart as an SVG file; of several runs, what compares them."),
]


def report(runs: Runs, out: Out = None, svg: Svg = None, debug: Debug = False) -> None:
    """Write one HTML file on runs, which opens without a network.

    Shows curves, evaluation images, where the time went, faults and restarts, environment, settings and hashes. For
    several runs it begins with a comparison.
    """
    from samebits.run_views.index import check_run
    from samebits.run_views.page.write import check_page
    from samebits.sweeps.state_file import is_sweep

    if len(runs) > MAX_RUNS:
        raise ConfigError(f"{len(runs)} run folders were given", allowed=f"at most {MAX_RUNS}", fix="Give fewer.")
    if out is None and len(runs) > 1:
        raise ConfigError("--out is missing for several runs", fix="Add --out FILE, such as --out report.html.")
    if len(runs) == 1 and is_sweep(runs[0]):
        _report_sweep(runs[0], out or runs[0] / "report.html", svg)
        return
    for run in runs:
        check_run(run)
    target = out or runs[0] / "report.html"
    check_page(target)
    from samebits.run_views.history import read_history
    from samebits.run_views.page.build import report_page

    histories = [read_history(run) for run in runs]
    _write(report_page(histories), target, histories, svg)


def _report_sweep(folder: Path, target: Path, svg: Path | None) -> None:
    from samebits.run_views.history import read_history
    from samebits.run_views.index import check_run
    from samebits.run_views.page.build import SweepRow, sweep_page
    from samebits.run_views.page.write import check_page
    from samebits.sweeps.state_file import read_sweep, settings_of
    from samebits.sweeps.view import ranked, read_trials

    check_page(target)
    sweep = read_sweep(folder)
    trials = ranked(read_trials(folder, sweep), sweep)
    rows = []
    for trial in trials:
        typed = settings_of(sweep.trials[trial.number])
        rows.append(SweepRow(trial.summary, [typed.get(key, "") for key in sweep.keys]))
    compared = [trial.summary.path for trial in trials if trial.summary.state != "waiting"][:MAX_COMPARED]
    for run in compared:
        check_run(run)
    histories = [read_history(run) for run in compared]
    _write(sweep_page(folder.absolute().name, sweep.keys, rows, histories), target, histories, svg)


def _write(page: str, target: Path, runs: Sequence[RunHistory], svg: Path | None) -> None:
    from samebits.run_views.page.write import write_page

    if svg is not None and runs:
        from samebits.run_views.page.figures import figures, write_figures

        drawn = figures(runs)
        write_figures(drawn, svg)
        print(f"charts  {svg}  {len(drawn)} SVG files")
    write_page(page, target)
    print(f"report  {target}  {len(page.encode()) / 1e6:.1f} MB")
