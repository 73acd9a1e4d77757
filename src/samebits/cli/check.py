"""`samebits check`: is my own recipe exact?"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any

import typer

from samebits.cli.options import Debug, Json, Overrides

SourceName = Annotated[str, typer.Argument(metavar="RECIPE", help="As for train.", show_default=False)]
GlobalBatch = Annotated[int, typer.Option(metavar="N", help="For a script: check it as samebits launch starts it.")]
MicroBatch = Annotated[int, typer.Option(metavar="N", help="The same.")]
NOT_EXACT = 1  # the exit code


def check(
    source: SourceName,
    overrides: Overrides = None,
    as_json: Json = False,
    global_batch: GlobalBatch = 0,
    micro_batch: MicroBatch = 0,
    debug: Debug = False,
) -> int:
    """Check that a recipe or script is exact on 1, 2 and 3 processes.

    Exact means equal bits; a script is one that calls samebits.exact. Names the cause if it is not. Takes about a
    minute for a small model, and writes nothing. The exit code is 1 if the recipe or script is not exact. What follows
    a script are its arguments: samebits check train.py -- --epochs 1
    """
    from samebits.launch import forkserver
    from samebits.launch.kernels import pin_kernels
    from samebits.own_loop.scripts import is_script
    from samebits.recipes.catalog import find

    # Nothing is written: no __pycache__ beside the recipe, here and in the processes that this one starts.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sizes = f"{global_batch}:{micro_batch}:0" if global_batch and micro_batch else ""
    if sizes or is_script(source):
        from samebits.own_loop.check_script import check_script

        what = f"{source} on 1, 2 and 3 processes, 6 steps each"
        return _report(lambda show: check_script(source, overrides or [], show, sizes), what, as_json)
    found = find(source)
    given = [*(overrides or []), "mode=exact"]
    config = found.load(given).config
    config.check_inputs()
    pin_kernels(config.kernels, only_children=True)
    forkserver.prepare([*forkserver.PRELOAD, "samebits.check.probe"], config.num_threads)
    from samebits.check import examine

    what = "1, 2 and 3 processes, 0 and 2 workers, a resume, 6 steps each"
    return _report(lambda show: examine.check(source, given, config, show), what, as_json)


def _report(check: Callable[[Callable[[str, int, int], None]], Any], what: str, as_json: bool) -> int:
    """Check, and print the report."""
    from samebits.check.finding import table
    from samebits.report.console import Console
    from samebits.report.format import clock

    with closing(Console(sys.stderr if as_json else sys.stdout, strict=True)) as console:
        report = check(console.share_done)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        console.say(f"check    {what}  {clock(report.seconds)}")
        console.draw(table(report.passed, report.findings))
    return NOT_EXACT if report.findings else 0
