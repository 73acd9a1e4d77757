"""`samebits find`: settings that are found by short trainings."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebits.cli.options import (
    Debug,
    Overrides,
    SourceName,
    check_results,
    command_group,
    path_option,
)
from samebits.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig


app = command_group("Find a learning rate by short trainings.")

Procs = Annotated[
    str | None,
    typer.Option(metavar="N", help="Processes; default: as for train.", show_default=False),
]
Steps = Annotated[
    int, typer.Option(min=10, max=10_000, metavar="N", help="Steps, one per learning rate.")
]
First = Annotated[
    float, typer.Option("--from", min=1e-12, metavar="LR", help="First learning rate.")
]
Last = Annotated[float, typer.Option("--to", max=1e6, metavar="LR", help="Last learning rate.")]
Out = Annotated[Path, path_option("--out", "DIR", "Folder for lr.json and lr.png.")]


# With a callback, typer keeps `lr` as a command although it is the only one.
@app.callback()
def _root() -> None:
    """Find a learning rate by short trainings."""


@app.command("lr")
def find_lr(
    source: SourceName,
    overrides: Overrides = None,
    procs: Procs = None,
    steps: Steps = 100,
    first: First = 1e-6,
    last: Last = 10.0,
    out: Out = Path("find-lr"),
    debug: Debug = False,
) -> None:
    """Find a learning rate by a range test.

    Trains with a growing rate until the loss diverges. In exact mode the result is the same at any
    number of processes. No run folder is written.
    """
    from samebits.finders.learning_rate import rates, suggest
    from samebits.launch import forkserver
    from samebits.launch.kernels import pin_kernels
    from samebits.recipes.catalog import find
    from samebits.report.chart import draw_rates
    from samebits.report.console import Console

    if last <= first:
        raise ConfigError(
            f"--from {first:g} is not below --to {last:g}", fix="Set --to to a higher rate."
        )
    check_results(out, "lr", "suggestion")
    found = find(source)
    config = found.load(overrides or []).config
    config.check_inputs()
    pin_kernels(config.kernels)
    forkserver.prepare([*forkserver.PRELOAD, "samebits.finders.learning_rate"], config.num_threads)
    # So many epochs that the data suffice for any number of steps.
    given = [*(overrides or []), "epochs=1000000000", "optim.warmup_epochs=0"]
    with closing(Console(sys.stdout, strict=True)) as console:
        measured = _measured(config, source, given, procs, rates(first, last, steps))
        lrs = measured["lr"]
        losses = measured["loss"]
        rate = suggest(lrs, losses)
        scale = config.peak_lr / config.optim.lr
        setting = None if rate is None else float(f"{rate / scale:.2g}")
        out.mkdir(parents=True, exist_ok=True)
        content = {"job": found.name, **measured, "suggestion": rate, "optim.lr": setting}
        (out / "lr.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        draw_rates(lrs, losses, out / "lr.png", suggestion=rate, name=found.name)
        end = "the loss diverged" if len(losses) < steps else "all were tested"
        console.say(
            f"tested {len(losses)} of {steps} learning rates from {first:g} to {last:g}: {end}"
        )
        if losses:
            lowest = min(losses)
            console.say(f"lowest loss {lowest:.4g} at {lrs[losses.index(lowest)]:.2g}")
        console.say(
            f"suggestion: optim.lr={setting:g}"
            if setting is not None
            else "no suggestion: no clear fall"
        )
        console.say(f"{out / 'lr.json'}  {out / 'lr.png'}")


def _measured(
    config: RunConfig,
    source: str,
    settings: list[str],
    procs: str | None,
    learning_rates: list[float],
) -> dict[str, list[float]]:
    from samebits.bench.processes import ask
    from samebits.finders.learning_rate import measure
    from samebits.launch.start import default_procs
    from samebits.process_range import parse_range

    size = parse_range(str(default_procs(config)) if procs is None else procs, "--procs")
    failure = LaunchError(
        f"{source} could not be trained on {size} process{'es' if size.most > 1 else ''}",
        fix=f"Train it alone: {shlex.join(['samebits', 'train', source, '--procs', str(size)])}",
    )
    measured: dict[str, list[float]] = ask(
        measure, (source, settings, learning_rates), size, config, failure
    )[0]
    return measured
