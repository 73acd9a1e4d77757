"""`samebits runs`, `compare`, `report` and `track`: what run folders hold, as tables and pages, and sent to a
tracker.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import (
    Debug,
    Json,
    RunFolder,
    argument,
    flag,
    json_text,
    option,
    path_of,
    path_option,
    table_columns,
)
from samebits.errors import CheckpointError, ConfigError, one_line

# `samebits runs`, `compare` and `report`: tables and pages of run folders.


# `samebits runs`: a table of runs.


Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", parser=path_of("DIR"), help="The folder that holds run folders."),
]
Where = Annotated[
    list[str] | None,
    option(
        "KEY>VALUE",
        "Show the runs that meet a condition on a column, metric or setting, such as 'optim.lr>0.1' or "
        "state=done; repeat for several. Operators: = != > >= < <=.",
    ),
]
Sort = Annotated[
    str | None,
    option("KEY", "Sort by a column, metric or setting, such as top1; default: by start."),
]
Reverse = Annotated[bool, flag("--reverse", "Reverse the order.")]


def runs(
    folder: Folder = Path("runs"),
    where: Where = None,
    sort: Sort = None,
    reverse: Reverse = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List runs with state, metric, time and hash.

    Run folders are only read, and no code in them is run.
    """
    from samebits.run_views.summary import read_summaries
    from samebits.run_views.table import parse_condition, select

    conditions = [parse_condition(text) for text in where or ()]
    found = read_summaries(folder)
    chosen = select(found, conditions, sort, is_reversed=reverse)
    if as_json:
        print(json_text([run.to_plain() for run in chosen]))
        return
    from samebits.report.console import Console
    from samebits.run_views.table import failure_lines, runs_table

    columns = table_columns()
    console = Console(sys.stdout, strict=True, columns=columns)
    if not chosen:
        what = "run meets the conditions" if found else "run folder"
        console.say(f"no {what} in {one_line(str(folder))}")
        return
    keys = [condition.key for condition in conditions] + ([sort] if sort else [])
    console.draw(runs_table(chosen, folder, columns, list(dict.fromkeys(keys))))
    for line in failure_lines(chosen):
        console.say(line)


# `samebits compare`: runs side by side.


MAX_RUNS = 26
Runs = Annotated[list[Path], argument("A B [C ...]", "Run folders.")]


def compare(runs: Runs, as_json: Json = False, debug: Debug = False) -> None:
    """Compare runs: settings, metrics, time.

    Settings, versions, code and data are listed where they differ. Run folders are only read. samebits report draws
    curves, and samebits diff finds the first step and value that differ.
    """
    from samebits.provenance.identity import altered_in
    from samebits.report.console import Console
    from samebits.run_views.compare import compare as compare_runs
    from samebits.run_views.history import read_history
    from samebits.run_views.summary import check_run
    from samebits.run_views.table import group_by_setting

    if not 2 <= len(runs) <= MAX_RUNS:
        raise ConfigError(
            f"{len(runs)} run folder{' was' if len(runs) == 1 else 's were'} given",
            allowed=f"2 to {MAX_RUNS} run folders",
            fix="Give run folders, such as samebits compare runs/digits-0001 runs/digits-0002.",
        )
    for run in runs:
        check_run(run)
    for run in runs:
        for text in altered_in(run):
            Console(sys.stderr).say(f"altered  {run}: {text}")
    comparison = compare_runs([read_history(run) for run in runs])
    if as_json:
        groups = group_by_setting([run.summary for run in comparison.runs])
        print(
            json_text(
                {**comparison.to_plain(), "by_setting": [group.to_plain() for group in groups]}
            )
        )
        return
    from samebits.run_views.compare import comparison_tables

    columns = table_columns()
    console = Console(sys.stdout, strict=True, columns=columns)
    for block in comparison_tables(comparison, columns):
        console.draw(block)


# `samebits report`: one HTML file on one or several runs.


RunOrRuns = Annotated[list[Path], argument("RUN...", "Run folders.")]
Out = Annotated[
    Path | None,
    path_option("--out", "FILE", "The HTML file; default: report.html in the run folder."),
]

Svg = Annotated[
    Path | None,
    path_option(
        "--svg", "DIR", "Also write each chart as an SVG file; of several runs, what compares them."
    ),
]


def report(runs: RunOrRuns, out: Out = None, svg: Svg = None, debug: Debug = False) -> None:
    """Write one HTML file on runs, which opens without a network.

    Shows curves, evaluation images, where the time went, faults and restarts, environment, settings and hashes. For
    several runs it begins with a comparison.
    """
    from samebits.run_views.page.build import check_page
    from samebits.run_views.summary import check_run

    if len(runs) > MAX_RUNS:
        raise ConfigError(
            f"{len(runs)} run folders were given", allowed=f"at most {MAX_RUNS}", fix="Give fewer."
        )
    if out is None and len(runs) > 1:
        raise ConfigError(
            "--out is missing for several runs", fix="Add --out FILE, such as --out report.html."
        )
    for run in runs:
        check_run(run)
    target = out or runs[0] / "report.html"
    check_page(target)
    from samebits.run_views.history import read_history
    from samebits.run_views.page.build import report_page, write_page

    histories = [read_history(run) for run in runs]
    page = report_page(histories)
    if svg is not None:
        from samebits.run_views.page.notebook import figures, write_figures

        drawn = figures(histories)
        write_figures(drawn, svg)
        print(f"charts  {svg}  {len(drawn)} SVG files")
    write_page(page, target)
    print(f"report  {target}  {len(page.encode()) / 1e6:.1f} MB")


# `samebits track`: send the records of a run folder to an experiment tracker.


To = Annotated[
    list[str],
    option("NAME", "wandb, mlflow, or a file with a samebits.Tracker. May be repeated."),
]


def track(run: RunFolder, to: To, debug: Debug = False) -> None:
    """Send the records of a run to experiment trackers.

    Only records that a tracker has not received yet are sent: after a failure, or for a run that had no tracker.
    """
    from samebits.config.schema import TRACKERS
    from samebits.recipes.trust import trust_named
    from samebits.report.trackers.start import TrackerProcess
    from samebits.report.trackers.tracker import check_trackers, label
    from samebits.storage.run_folder import check_entries, check_run_path

    check_run_path(run)
    for name in to:
        if name == "tensorboard" or (name not in TRACKERS and not name.endswith(".py")):
            allowed = f"{', '.join(TRACKERS[1:])}, or a Python file"
            raise ConfigError(f"--to is {name!r}", allowed=allowed, fix="Name one of these.")
    check_trackers(to)
    check_entries(run)
    is_done = (run / "result.json").is_file()
    for name in to:
        trust_named(name)
        process = TrackerProcess(name, run, lambda text: print(text, file=sys.stderr), is_new=False)
        process.end("done" if is_done else "stopped")
        process.close(is_patient=True)
        if process.has_failed:
            raise CheckpointError(
                f"tracker {label(name)} has not received all records of {run}",
                where=run / "logs" / f"tracker-{label(name)}.log",
                fix="Read the log, and run the command again: records that it received are not sent twice.",
            )
        print(f"{label(name)} has the records of {run}")
