"""`samebits find`: settings that are found by short trainings."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.options import Debug, Overrides, SourceName, command_group, path_option
from samebits.errors import ConfigError, LaunchError, SamebitsError

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig
    from samebits.recipes.catalog import RecipeSpec

app = command_group("Find a learning rate by short trainings.")

Procs = Annotated[str | None, typer.Option(metavar="N", help="Processes; default: as for train.", show_default=False)]
Steps = Annotated[int, typer.Option(min=10, max=10_000, metavar="N", help="Steps, one per learning rate.")]
First = Annotated[float, typer.Option("--from", min=1e-12, metavar="LR", help="First learning rate.")]
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
    from samebits.finders.learning_rate import measure, rates, suggest
    from samebits.report.chart import draw_rates
    from samebits.report.console import Console
    from samebits.storage.run_folder import check_target

    if last <= first:
        raise ConfigError(f"--from {first:g} is not below --to {last:g}", fix="Set --to to a higher rate.")
    for name in ("lr.json", "lr.png"):
        check_target(out / name, lambda _: _is_own(out / "lr.json"))
    found, config = _prepare(source, overrides, "samebits.finders.learning_rate")
    # So many epochs that the data suffice for any number of steps.
    given = [*(overrides or []), "epochs=1000000000", "optim.warmup_epochs=0"]
    with closing(Console(sys.stdout, strict=True)) as console:
        measured = _run(config, procs, measure, (source, given, rates(first, last, steps)), source)
        lrs, losses = measured["lr"], measured["loss"]
        rate = suggest(lrs, losses)
        scale = config.peak_lr / config.optim.lr
        setting = None if rate is None else float(f"{rate / scale:.2g}")
        out.mkdir(parents=True, exist_ok=True)
        content = {"job": found.name, **measured, "suggestion": rate, "optim.lr": setting}
        (out / "lr.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        draw_rates(lrs, losses, out / "lr.png", suggestion=rate, name=found.name)
        end = "the loss diverged" if len(losses) < steps else "all were tested"
        console.say(f"tested {len(losses)} of {steps} learning rates from {first:g} to {last:g}: {end}")
        if losses:
            lowest = min(losses)
            console.say(f"lowest loss {lowest:.4g} at {lrs[losses.index(lowest)]:.2g}")
        console.say(f"suggestion: optim.lr={setting:g}" if setting is not None else "no suggestion: no clear fall")
        console.say(f"{out / 'lr.json'}  {out / 'lr.png'}")


def _prepare(source: str, overrides: list[str] | None, module: str) -> tuple[RecipeSpec, RunConfig]:
    """Resolve the settings, and start the fork server."""
    from samebits.launch import forkserver
    from samebits.launch.kernels import pin_kernels
    from samebits.recipes.catalog import find

    found = find(source)
    config = found.load(overrides or []).config
    config.check_inputs()
    pin_kernels(config.kernels)
    forkserver.prepare([*forkserver.PRELOAD, module], config.num_threads)
    return found, config


def _run(
    config: RunConfig, procs: str | None, entry: Callable[..., int], arguments: tuple[Any, ...], source: str
) -> Mapping[str, Any]:
    """Run an entry in new processes, and return what its rank 0 wrote."""
    from samebits.config.process_range import ProcessRange, parse_range
    from samebits.launch.start import default_procs, launch_here
    from samebits.launch.stopped import raise_if_stopped

    default = default_procs(config)
    size = parse_range(procs, "--procs") if procs is not None else ProcessRange(default, default)
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "measured.json"
        failure: SamebitsError | None = None
        try:
            code = launch_here(size, config, entry, (*arguments, out))
        except SamebitsError as error:
            code, failure = 1, error
        raise_if_stopped(code)
        measured: dict[str, Any] = json.loads(out.read_bytes()) if out.is_file() else {}
    if code:
        raise failure or LaunchError(
            f"{source} could not be trained on {size} process{'es' if size.most > 1 else ''}",
            fix=f"Train it alone: {shlex.join(['samebits', 'train', source, '--procs', str(size)])}",
        )
    return measured


def _is_own(path: Path) -> bool:
    """Return whether this command wrote a file."""
    try:
        return "suggestion" in json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return False
