"""`samebits simulate`: a job on hundreds of virtual ranks in one process."""

import json
import sys
from contextlib import closing
from typing import Annotated

import typer

from samebits.cli.options import Debug, Json, Overrides, SourceName
from samebits.config.process_range import MAX_PROCS
from samebits.errors import ConfigError, TrainError

Procs = Annotated[
    str,
    typer.Option(metavar="1,64,1000-900", help="Numbers of ranks, a run for each. 1000-900: they take turns in a run."),
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
    from samebits.config.combinations import first_met
    from samebits.launch.kernels import pin_kernels
    from samebits.recipes.catalog import find

    sizes = _sizes(procs)
    found = find(source)
    config = found.load(overrides or []).config
    if obstacle := first_met(config, "mode!=exact", "parallel!=ddp", "watch.recheck", "compile=true"):
        raise ConfigError(f"{obstacle} cannot be simulated", fix="Simulate the run without this setting.")
    pin_kernels(config.kernels)
    import torch

    from samebits.engine.dataset_info import find_dataset_info
    from samebits.report.console import Console
    from samebits.simulate import run, table

    torch.set_num_threads(config.num_threads)
    dataset_info = find_dataset_info(found, config)
    console, done = Console(sys.stderr if as_json else sys.stdout, strict=True), []
    with closing(console):
        for size in sizes:
            label = f"simulating {'-'.join(map(str, size))} rank{'s' if size != (1,) else ''}"
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
        console.say(table.conclusion(done))
    if len({each.sha256 for each in done}) > 1:
        raise typer.Exit(TrainError.exit_code)


def _sizes(text: str) -> list[tuple[int, ...]]:
    runs = [part.strip().split("-") for part in text.split(",")]
    if not all(part.isdigit() and 0 < int(part) <= MAX_PROCS for run in runs for part in run):
        raise ConfigError(
            f"--procs is {text!r}",
            allowed=f"numbers of ranks such as 1,64,1000, each up to {MAX_PROCS}; 1000-900 takes turns",
            fix="Set --procs to such numbers, separated by commas.",
        )
    return [tuple(map(int, run)) for run in runs]
