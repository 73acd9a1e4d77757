"""`samebits call`: the processes of `samebits.launch`, which starts this command. Not for users."""

from pathlib import Path
from typing import Annotated

import typer

from samebits.config.process_range import parse_range

Procs = Annotated[str, typer.Option(metavar="N", help="Number of processes.")]
Threads = Annotated[int, typer.Option(metavar="N", help="CPU threads of each process.")]


def call(description: Path, procs: Procs = "1", threads: Threads = 1) -> int:
    """Call a function that `samebits.launch` has pickled."""
    from samebits.launch import forkserver
    from samebits.launch.function import PRELOAD, call_in_worker, read_call
    from samebits.launch.subcommand import end_with_caller

    end_with_caller()
    content, size = read_call(description), parse_range(procs, "procs")
    # Before torch is imported here, so that both imports run at the same time.
    forkserver.prepare(PRELOAD, threads)
    from samebits.launch.launch import launch

    return launch(size.most, call_in_worker, (content,), min_procs=size.least, preload=PRELOAD)
