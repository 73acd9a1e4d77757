"""`samebits runs`: a table of runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import Debug, Json, json_text, path_of, table_columns

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", parser=path_of("DIR"), help="The folder that holds run folders.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY>VALUE",
        help="Show the runs that meet a condition on a column, metric or setting, such as 'optim.lr>0.1' or "
        "state=done; repeat for several. Operators: = != > >= < <=.",
    ),
]
Sort = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Sort by a column, metric or setting, such as top1; default: by start."),
]
Reverse = Annotated[bool, typer.Option("--reverse", help="Reverse the order.")]


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
    from samebits.run_views.index import read_summaries
    from samebits.run_views.select import parse_condition, select

    conditions = [parse_condition(text) for text in where or ()]
    found = read_summaries(folder)
    chosen = select(found, conditions, sort, is_reversed=reverse)
    if as_json:
        print(json_text([run.to_plain() for run in chosen]))
        return
    from samebits.report.console import Console
    from samebits.run_views.table import failure_lines, one_line, runs_table

    columns = table_columns()
    console = Console(sys.stdout, strict=True, columns=columns)
    if not chosen:
        what = "run meets the conditions" if found else "run folder"
        console.say(f"no {what} in {one_line(str(folder))}")
        return
    keys = [condition.key for condition in conditions] + ([sort] if sort else [])
    console.draw(runs_table(chosen, folder, columns, list(dict.fromkeys(keys))), wraps=False)
    for line in failure_lines(chosen):
        console.say(line)
