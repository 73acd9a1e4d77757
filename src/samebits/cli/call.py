"""`samebits call`: the processes of `samebits.launch`, which starts this command. Not for users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samebits.config.process_range import parse_range

Procs = Annotated[str, typer.Option(metavar="N", help="Number of processes.")]
Threads = Annotated[int, typer.Option(metavar="N", help="CPU threads of each process.")]


def call(description: Path, procs: Procs = "1", threads: Threads = 1) -> int:
    """Call a function that `samebits.launch` has written down."""
    from samebits.launch import forkserver
    from samebits.launch.function import PRELOAD
    from samebits.launch.subcommand import end_with_caller

    end_with_caller()
    size = parse_range(procs, "procs")
    # Before torch is imported here, so that both imports run at the same time.
    forkserver.prepare(PRELOAD, threads)
    from samebits.launch.launch import launch

    text = description.read_text(encoding="utf-8")
    return launch(size.most, _call_in_worker, (text,), min_procs=size.least, preload=PRELOAD)


def _call_in_worker(text: str) -> None:
    from samebits.launch.function import call_in_worker
    from samebits.recipes.recipe_file import load_file

    call_in_worker(text, load_file)
