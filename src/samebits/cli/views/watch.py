"""`samebits watch`: follow a run from another terminal."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import Debug, is_ascii_output, table_columns

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/digits-0007.", show_default=False)]


def watch(run: Run, debug: Debug = False) -> int:
    """Follow a run: progress, curves, speed, last warnings.

    Reads the files of the run folder, which may be on a shared disk. Ends with the run: exit code 0 if it is complete,
    1 if it was stopped or failed. Ctrl-C ends the view only.
    """
    from samebits.report.console import Console
    from samebits.report.stream import is_terminal
    from samebits.run_views.index import check_run
    from samebits.run_views.watch import watch as watch_run

    check_run(run)
    columns = table_columns()
    size = (min(columns, 160), shutil.get_terminal_size((80, 40)).lines - 1)
    console = Console(sys.stdout, strict=True, columns=columns)
    return watch_run(run, console, size, is_terminal=is_terminal(sys.stdout), is_ascii=is_ascii_output())
