"""`samebits plan`: memory and FLOPs of a run, before it starts."""

import json
import sys
from typing import Annotated

import typer

from samebits.cli.options import Debug, Json, Overrides, SourceName
from samebits.errors import DataError

Procs = Annotated[int, typer.Option(min=1, metavar="N", help="Processes, one per GPU.")]
MemoryGb = Annotated[
    float | None,
    typer.Option(min=0.1, metavar="G", help="Memory of each process, GB: print what fits."),
]


def plan(
    source: SourceName,
    overrides: Overrides = None,
    procs: Procs = 1,
    memory_gb: MemoryGb = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Estimate memory and FLOPs of a run."""
    from samebits.recipes.catalog import find

    found = find(source)
    config = found.load(overrides or []).config
    from samebits.engine.build import find_dataset_info
    from samebits.report.console import Console
    from samebits.scaling.plan_table import plan_values, show

    try:
        dataset_info = find_dataset_info(found, config)
    except DataError as error:
        from samebits.recipes.catalog import list_makers

        why = "the size of the model depends on the data, such as its number of classes"
        if found.recipe in list_makers():
            why += f"\nsynthetic data is enough: samebits data make {found.recipe} --out DIR"
        cause = "\n".join(filter(None, [error.slots.get("cause"), why]))
        raise error.with_slots(cause=cause) from error
    planned = plan_values(config, lambda: found.build(config, dataset_info), procs, memory_gb)
    if as_json:
        print(json.dumps(planned))
        return
    show(Console(sys.stdout, strict=True), found.name, planned)
