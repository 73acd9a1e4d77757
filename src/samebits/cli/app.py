"""The commands of `samebits`, by name. Each module imports late, so that --help answers before torch is imported."""

from typing import Annotated

import typer

from samebits.cli import config, doctor, launch, model, replay, runs, train
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


# In the help each group has a heading; the order is that of a user's day.
app.command("train", rich_help_panel="Train")(train.train)
app.command("launch", context_settings=launch.CONTEXT, rich_help_panel="Train")(launch.launch)
app.command("config", rich_help_panel="Train")(config.config)
app.add_typer(config.app, name="data", rich_help_panel="Train")
app.command("eval", rich_help_panel="Look")(model.evaluate)
app.command("predict", rich_help_panel="Look")(model.predict)
app.command("runs", rich_help_panel="Look")(runs.runs)
app.command("compare", rich_help_panel="Look")(runs.compare)
app.command("report", rich_help_panel="Look")(runs.report)
app.command("track", rich_help_panel="Look")(runs.track)
app.command("check", rich_help_panel="Check")(replay.check)
app.command("gate", rich_help_panel="Check")(replay.gate)
app.command("debug", rich_help_panel="Check")(replay.debug)
app.command("verify", rich_help_panel="Check")(replay.verify)
app.command("diff", rich_help_panel="Check")(replay.diff)
app.command("export", rich_help_panel="Share")(model.export)
app.command("push", rich_help_panel="Share")(model.push)
app.command("pull", rich_help_panel="Share")(model.pull)
app.command("trust", rich_help_panel="Share")(config.trust)
app.command("doctor", rich_help_panel="Cluster")(doctor.doctor)
app.command("submit", rich_help_panel="Cluster")(launch.submit)
app.command("call", hidden=True)(launch.call)
