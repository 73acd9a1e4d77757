"""`samebits compare`: runs side by side."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import Debug, Json, json_text, table_columns
from samebits.errors import ConfigError

MAX_RUNS = 26
Runs = Annotated[list[Path], typer.Argument(metavar="A B [C ...]", help="Run folders.", show_default=False)]


def compare(runs: Runs, as_json: Json = False, debug: Debug = False) -> None:
    """Compare runs: settings, metrics, time.

    Settings, versions, code and data are listed where they differ. Run folders are only read. samebits report draws
    curves, and samebits diff finds the first step and value that differ.
    """
    from samebits.provenance.altered import altered_in
    from samebits.report.console import Console
    from samebits.run_views.compare import compare as compare_runs
    from samebits.run_views.history import read_history
    from samebits.run_views.index import check_run
    from samebits.run_views.repeats import group_by_setting

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
        print(json_text({**comparison.to_plain(), "by_setting": [group.to_plain() for group in groups]}))
        return
    from samebits.run_views.compare_table import comparison_tables

    columns = table_columns()
    console = Console(sys.stdout, strict=True, columns=columns)
    for block in comparison_tables(comparison, columns):
        console.draw(block)
