"""`samebits sweep`: a recipe trained with several settings."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer.core import TyperCommand

from samebits.cli.options import (
    Debug,
    GridValues,
    Json,
    Overrides,
    argument,
    flag,
    json_text,
    option,
    path_option,
    table_columns,
)
from samebits.errors import ConfigError

if TYPE_CHECKING:
    from samebits.report.console import Console
    from samebits.sweeps.state_file import Sweep


_MANY = "--grid"


class SweepCommand(TyperCommand):
    """The command, with an option that takes all `KEY=VALUES` after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values, since click's options take a fixed number of them."""
        repeated: list[str] = []
        option: str | None = None
        for text in args:
            if text.startswith("-"):
                option = text if text == _MANY else None
                repeated += [] if option else [text]
            else:
                repeated += [option, text] if option and "=" in text else [text]
        return super().parse_args(ctx, repeated)


Source = Annotated[
    str,
    argument("SOURCE", "As for train; or the folder of a sweep to resume."),
]
Jobs = Annotated[
    int | None,
    option(
        "N", "Trials side by side; default: as many as there are cores, or GPUs.", min=1, max=1024
    ),
]
Procs = Annotated[int, option("N", "Processes of each trial; does not change results.", min=1)]
SweepDir = Annotated[
    Path | None,
    path_option("--sweep-dir", "DIR", "Folder of the sweep; default: a new one below runs/."),
]
Show = Annotated[bool, flag("--show", "Print the table of the sweep in SOURCE, and train nothing.")]


def sweep(
    source: Source,
    overrides: Overrides = None,
    grid: GridValues = None,
    jobs: Jobs = None,
    procs: Procs = 1,
    sweep_dir: SweepDir = None,
    show: Show = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Train with several settings, side by side, and compare.

    A sweep that was stopped or killed is resumed by samebits sweep FOLDER, with the same results.
    """
    from samebits.report.console import Console
    from samebits.sweeps.state_file import check_recipe, is_sweep, read_sweep

    columns = table_columns()
    console = Console(sys.stderr if as_json else sys.stdout, columns=columns)
    if is_sweep(folder := Path(source)):
        if overrides or grid:
            raise ConfigError(
                f"{source} is a sweep, whose settings stay as they are",
                fix="Resume it without settings, or start another sweep from its recipe.",
            )
        found = read_sweep(folder)
        if show:
            return _print(found, folder, console, as_json=as_json)
        check_recipe(found, folder)
    else:
        if show:
            raise ConfigError(
                f"--show was given, and {source} is not the folder of a sweep",
                fix="Name its folder.",
            )
        found, folder = _define(source, overrides or [], grid or [], sweep_dir)
    return _run(found, folder, console, jobs, procs, as_json=as_json)


def _define(
    source: str, overrides: list[str], grid: list[str], sweep_dir: Path | None
) -> tuple[Sweep, Path]:
    """Define a new sweep, check it, and create its folder."""
    from samebits.cli.start_run import check_before_start
    from samebits.sweeps.state_file import define_grid, make_folder

    if not grid:
        raise ConfigError(
            "a sweep needs values to try",
            allowed="--grid KEY=A,B",
            fix="Name settings with their values: --grid optim.lr=0.1,0.03 seed=0:3",
        )
    found = define_grid(source, overrides, grid)
    check_before_start(found.load(found.trials[0]).config, None, "never")
    folder = make_folder(found.recipe.name, sweep_dir)
    found.write(folder)
    return found, folder


def _run(
    found: Sweep, folder: Path, console: Console, jobs: int | None, procs: int, *, as_json: bool
) -> int:
    """Train what is left of a sweep, and print the table."""
    from samebits.cluster.signals import StopSignal
    from samebits.sweeps.runner import Runner, make_slots
    from samebits.sweeps.state_file import locked

    slots = make_slots(jobs, procs, found.load(found.trials[0]).config)
    num_trials = len(found.trials)
    with StopSignal() as stop, locked(folder):
        console.say(
            f"sweep {folder}: {num_trials} trial{'s' if num_trials > 1 else ''}, {len(slots)} side by side, "
            f"{procs} process{'es' if procs > 1 else ''} each"
        )

        def show(num_active: int, num_done: int) -> None:
            console.share_done(f"{num_active} training, trials done", num_done, num_trials)

        reasons = Runner(folder, found, slots, procs, console.say, show).run(stop)
        console.close()
        code = _print(found, folder, console, reasons, as_json=as_json)
        if stop.requested:
            console.say(f"stopped; resume with\n  samebits sweep {shlex.quote(str(folder))}")
            return stop.exit_code
    return code or int(bool(reasons))


def _print(
    found: Sweep,
    folder: Path,
    console: Console,
    reasons: Mapping[str, str] | None = None,
    *,
    as_json: bool,
) -> int:
    """Print the trials, best first; return the exit code."""
    from samebits.run_views.table import (
        TITLE,
        failure_lines,
        group_by_setting,
        runs_table,
        seed_table,
    )
    from samebits.sweeps.runner import ranked, read_trials

    trials = read_trials(folder, found, reasons)
    groups = group_by_setting([trial.summary for trial in trials])
    if as_json:
        content = {
            "sweep": str(folder),
            "trials": [trial.to_plain() for trial in trials],
            "by_setting": [group.to_plain() for group in groups],
        }
        print(json_text(content))
        return 0
    rows = [trial.summary for trial in ranked(trials)]
    columns = table_columns()
    if rows:
        console.draw(runs_table(rows, folder, columns, found.keys))
    if groups:
        console.say(f"\n{TITLE}")
        console.draw(seed_table(groups, columns))
    for line in failure_lines(rows):
        console.say(line)
    return 0
