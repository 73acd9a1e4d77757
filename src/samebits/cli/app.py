"""The commands of `samebits`, by name. Each module imports late, so that --help answers before torch is imported."""

from typing import Annotated

import typer

from samebits.cli import call, check, config, data, diff, evaluate, export, hub, predict, track, train, trust, verify
from samebits.cli.finders import find, sweep
from samebits.cli.machines import doctor, launch, plan, scale, simulate, submit
from samebits.cli.options import CONTEXT, Commands, LocalRank
from samebits.cli.views import compare, report, runs
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    local_rank: LocalRank = None,  # torch.distributed.launch puts it before the command's name
) -> None:
    """Train PyTorch vision models on any number of processes, to the same model each time.

    First run:  samebits train digits
    """


app.command("train")(train.train)
app.command("launch", context_settings=launch.CONTEXT)(launch.launch)
app.command("eval")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("verify")(verify.verify)
app.command("diff")(diff.diff)
app.command("runs")(runs.runs)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("push")(hub.push)
app.command("pull")(hub.pull)
app.command("config")(config.config)
app.command("check")(check.check)
app.command("doctor")(doctor.doctor)
app.command("scale")(scale.scale)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("sweep", cls=sweep.SweepCommand)(sweep.sweep)
app.command("track")(track.track)
app.command("submit", cls=sweep.SweepCommand)(submit.submit)
app.command("trust")(trust.trust)
app.command("call", hidden=True)(call.call)
app.add_typer(find.app, name="find")
app.add_typer(data.app, name="data")
