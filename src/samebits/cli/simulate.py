"""`samebits simulate`: a job on hundreds of virtual ranks in one process."""

import json
import re
import sys
from contextlib import closing
from typing import Annotated

import typer

from samebits.cli.options import Debug, Json, Overrides, SourceName
from samebits.errors import ConfigError, TrainError
from samebits.process_range import MAX_PROCS

Procs = Annotated[
    str,
    typer.Option(
        metavar="1,64,1000-900",
        help="Numbers of ranks, a run for each. 1000-900: they take turns in a run. 2x4, 3+1: ranks of each machine.",
    ),
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Steps of each run.")]


def simulate(
    source: SourceName,
    overrides: Overrides = None,
    procs: Procs = "1,2,64",
    steps: Steps = 5,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train on virtual ranks in one process, and compare weights.

    Shows what each rank sends and holds in a world that this machine does not have. The exit code is 6 if the weights
    are not equal.
    """
    from samebits.config.schema import first_met
    from samebits.launch.kernels import pin_kernels
    from samebits.recipes.catalog import find

    sizes = _sizes(procs)
    found = find(source)
    config = found.load(overrides or []).config
    if obstacle := first_met(
        config, "mode!=exact", "parallel=fsdp", "watch.recheck", "compile=true"
    ):
        raise ConfigError(
            f"{obstacle} cannot be simulated", fix="Simulate the run without this setting."
        )
    pin_kernels(config.kernels)
    import torch

    from samebits.engine.build import find_dataset_info
    from samebits.report.console import Console
    from samebits.simulate import run, table

    torch.set_num_threads(config.num_threads)
    dataset_info = find_dataset_info(found, config)
    console = Console(sys.stderr if as_json else sys.stdout, strict=True)
    done = []
    with closing(console):
        for size in sizes:
            label = f"simulating {'-'.join(map(table.world_text, size))} rank{'s' if size != [(1,)] else ''}"
            done.append(
                run.simulate(
                    config,
                    lambda: found.build(config, dataset_info),
                    size,
                    steps,
                    lambda number, of, label=label: console.share_done(label, number, of),  # type: ignore[misc]
                )
            )
    if as_json:
        print(json.dumps({"runs": [{**vars(each), "procs": list(each.procs)} for each in done]}))
    else:
        console.draw(table.table(done))
        console.say(f"\n{table.FOOTNOTE}\n")
        for line in table.links(done):
            console.say(line)
        console.say(table.conclusion(done))
    if len({each.sha256 for each in done}) > 1:
        raise typer.Exit(TrainError.exit_code)


def _sizes(text: str) -> list[list[tuple[int, ...]]]:
    """Read for each run its worlds: the number of ranks of each machine."""
    runs = [[_machines(world) for world in run.strip().split("-")] for run in text.split(",")]
    if not all(
        min(world, default=0) > 0 and sum(world) <= MAX_PROCS for run in runs for world in run
    ):
        raise ConfigError(
            f"--procs is {text!r}",
            allowed=f"numbers of ranks such as 1,64,1000, each up to {MAX_PROCS}; 1000-900 takes turns; "
            "2x4 or 3+1: on several machines",
            fix="Set --procs to such numbers, separated by commas.",
        )
    return runs


def _machines(text: str) -> tuple[int, ...]:
    """Read 4, 2x4 or 3+1: the number of ranks of each machine; empty if it is no such text."""
    machines: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"(?:(\d{1,5})x)?(\d{1,5})", part)
        if match is None:
            return ()
        machines += [int(match[2])] * int(match[1] or 1)
    return tuple(machines)
