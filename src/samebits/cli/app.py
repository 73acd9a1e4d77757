"""The commands of `samebits`, by name. Each module imports late, so that --help answers before torch is imported."""

from typing import Annotated

import typer

from samebits.cli import config, data, doctor, launch, model, replay, runs, sweep, track, train
from samebits.cli.options import CONTEXT, Commands, LocalRank
from samebits.version import __version__

# Plain help takes half the time of help with boxes, and reads the same in a log.
app = typer.Typer(
    name="samebits",
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def _print_version(value: bool) -> None:
    if value:
        print(f"samebits {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    local_rank: LocalRank = None,  # torch.distributed.launch puts it before the command's name
) -> None:
    """Train PyTorch vision models on any number of processes, to the same model each time.

    First run:  samebits train digits
    """


app.command("train")(train.train)
app.command("launch", context_settings=launch.CONTEXT)(launch.launch)
app.command("eval")(model.evaluate)
app.command("predict")(model.predict)
app.command("verify")(replay.verify)
app.command("diff")(replay.diff)
app.command("runs")(runs.runs)
app.command("compare")(runs.compare)
app.command("report")(runs.report)
app.command("export")(model.export)
app.command("push")(model.push)
app.command("pull")(model.pull)
app.command("config")(config.config)
app.command("check")(replay.check)
app.command("doctor")(doctor.doctor)
app.command("sweep", cls=sweep.SweepCommand)(sweep.sweep)
app.command("track")(track.track)
app.command("submit", cls=sweep.SweepCommand)(launch.submit)
app.command("trust")(config.trust)
app.command("call", hidden=True)(launch.call)
app.add_typer(data.app, name="data")
