"""`samebits eval`: needs only the run folder, or a file of weights and the name of its model."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import Checkpoint, Debug, Json, MachineOverrides, Model, Preset
from samebits.config.process_range import MAX_PROCS

Procs = Annotated[
    int | None, typer.Option(min=1, max=MAX_PROCS, metavar="N", help="Processes on this machine; default: 1.")
]


def print_weights(run: Path, checkpoint: str) -> None:
    """Name the weights that a command has taken, on standard error: standard output is for its result."""
    from samebits.inference.taken_weights import describe_weights

    if line := describe_weights(run, checkpoint):
        print(line, file=sys.stderr, flush=True)


def evaluate(
    run: Model,
    overrides: MachineOverrides = None,
    preset: Preset = None,
    procs: Procs = None,
    checkpoint: Checkpoint = "last",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate a model on the validation set, each sample once."""
    from samebits.inference import predict

    metrics = predict.evaluate(run, overrides or [], procs, checkpoint, preset=preset)
    if not metrics:  # another rank than 0, which prints nothing
        return
    print_weights(run, checkpoint)
    if as_json:
        print(json.dumps(metrics))
        return
    from samebits.errors import printable
    from samebits.report.format import metric_value

    width = max((len(printable(name)) for name in metrics), default=0)
    for name, value in metrics.items():
        is_none = metric_value(name, value) == "none"  # an average over no ground truth
        text = "none" if is_none else int(value) if value.is_integer() else f"{value:.6g}"
        print(f"{printable(name):<{width}}  {text}")  # names of classes are a stranger's
