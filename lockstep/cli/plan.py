"""`lockstep plan`: what a run would take in memory, arithmetic and sending, before it is started."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from lockstep.cli.options import Debug, Json, Overrides
from lockstep.errors import DataError

SourceName = Annotated[str, typer.Argument(metavar="SOURCE", help="As for train.", show_default=False)]
Procs = Annotated[int, typer.Option(min=1, metavar="N", help="Processes, one a GPU.")]
MemoryGb = Annotated[
    float | None, typer.Option(min=0.1, metavar="G", help="Memory of each process, GB: what would fit?")
]


def plan(
    source: SourceName,
    overrides: Overrides = None,
    procs: Procs = 1,
    memory_gb: MemoryGb = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a run would take: memory by part, FLOPs and bytes sent a step. Nothing is trained."""
    from lockstep.config.load import load
    from lockstep.recipes.catalog import find

    found = find(source)
    config = load(found.config_class, found.layers, list(overrides or [])).config
    from lockstep.engine.dataset_info import find_dataset_info
    from lockstep.scaling.plan_table import figures, table

    try:
        dataset_info = find_dataset_info(found, config)
    except DataError as error:
        raise DataError(error.what, **error.slots, plan=_why_data(found.recipe)) from error
    planned = figures(config, lambda: found.build(config, dataset_info), procs, memory_gb)
    print(json.dumps(planned) if as_json else "\n".join(table(found.name, planned)))


def _why_data(recipe: str) -> str:
    """Why a plan looks at data, and what to plan with where there is none."""
    from lockstep.recipes.makers import makers

    why = "the model's size follows from the data (its classes, say)"
    if recipe not in (maker.recipe for maker in makers()):
        return why
    return f"{why}\nmade-up data will do: lockstep data make {recipe} --out DIR"
