"""`lockstep report`: one HTML file on one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Debug, path_of
from lockstep.errors import ConfigError

MAX_RUNS = 26
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", parser=path_of("--out"), metavar="FILE", help="The HTML file; default: report.html in the run folder."
    ),
]


def report(runs: Runs, out: Out = None, debug: Debug = False) -> None:
    """Write one HTML file on runs, which opens without a network.

    Shows curves, evaluation images, where the time went, faults and restarts, environment, settings and hashes. For
    several runs it begins with a comparison.
    """
    from lockstep.run_views.index import check_run
    from lockstep.run_views.page.write import check_page

    if len(runs) > MAX_RUNS:
        raise ConfigError(f"{len(runs)} run folders were given", allowed=f"at most {MAX_RUNS}", fix="Give fewer.")
    if out is None and len(runs) > 1:
        raise ConfigError("--out is missing for several runs", fix="Add --out FILE, such as --out report.html.")
    for run in runs:
        check_run(run)
    target = out or runs[0] / "report.html"
    check_page(target)
    from lockstep.run_views.history import read_history
    from lockstep.run_views.page.build import report_page
    from lockstep.run_views.page.write import write_page

    page = report_page([read_history(run) for run in runs])
    write_page(page, target)
    print(f"report  {target}  {len(page.encode()) / 1e6:.1f} MB")
