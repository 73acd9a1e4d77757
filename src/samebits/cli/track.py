"""`samebits track`: send the records of a run folder to an experiment tracker."""

import sys
from typing import Annotated

import typer

from samebits.cli.options import Debug, RunFolder
from samebits.errors import CheckpointError, ConfigError

To = Annotated[
    list[str],
    typer.Option(
        metavar="NAME", help="wandb, mlflow, or a file with a samebits.Tracker. May be repeated."
    ),
]


def track(run: RunFolder, to: To, debug: Debug = False) -> None:
    """Send the records of a run to experiment trackers.

    Only records that a tracker has not received yet are sent: after a failure, or for a run that had no tracker.
    """
    from samebits.config.schema import TRACKERS
    from samebits.recipes.trust import trust_named
    from samebits.report.trackers.known import check_trackers, label
    from samebits.report.trackers.start import TrackerProcess
    from samebits.storage.run_folder import check_entries, check_run_path

    check_run_path(run)
    for name in to:
        if name == "tensorboard" or (name not in TRACKERS and not name.endswith(".py")):
            allowed = f"{', '.join(TRACKERS[1:])}, or a Python file"
            raise ConfigError(f"--to is {name!r}", allowed=allowed, fix="Name one of these.")
    check_trackers(to)
    check_entries(run)
    is_done = (run / "result.json").is_file()
    for name in to:
        trust_named(name)
        process = TrackerProcess(
            name, run, lambda text: print(text, file=sys.stderr), is_new=False, is_patient=True
        )
        process.end("done" if is_done else "stopped")
        process.close()
        if process.has_failed:
            raise CheckpointError(
                f"tracker {label(name)} has not received all records of {run}",
                where=run / "logs" / f"tracker-{label(name)}.log",
                fix="Read the log, and run the command again: records that it received are not sent twice.",
            )
        print(f"{label(name)} has the records of {run}")
