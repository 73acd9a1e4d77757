"""`samebits plan`: memory, FLOPs, communication and step time of a run, before it starts."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.options import Debug, Json, Overrides
from samebits.config.process_range import MAX_PROCS
from samebits.cores import num_cores
from samebits.errors import ConfigError, DataError, LaunchError

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig
    from samebits.engine.parts import Parts
    from samebits.parallel.exchange.link import Link
    from samebits.scaling.step_time.model import StepCosts

MOST = 4  # processes of a core in which a step is measured; more would need much memory

SourceName = Annotated[str, typer.Argument(metavar="SOURCE", help="As for train.", show_default=False)]
Procs = Annotated[int, typer.Option(min=1, metavar="N", help="Processes, one per GPU.")]
MemoryGb = Annotated[
    float | None, typer.Option(min=0.1, metavar="G", help="Memory of each process, GB: print what fits.")
]
LinkText = Annotated[
    str | None,
    typer.Option(
        "--link", metavar="RATE,DELAY", help="Link between machines, such as 100Gbit,5us: predict the step time."
    ),
]
Nodes = Annotated[int | None, typer.Option(min=1, metavar="N", help="Machines. Needs --link.")]
Gpus = Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes of each machine. Needs --link.")]
ComputeMs = Annotated[
    float | None,
    typer.Option(min=0.001, metavar="MS", help="Time of a micro-batch on a GPU, if not this machine's. Needs --link."),
]
Price = Annotated[float | None, typer.Option(min=0.0, metavar="P", help="Of a machine for an hour. Needs --link.")]


def plan(
    source: SourceName,
    overrides: Overrides = None,
    procs: Procs = 1,
    memory_gb: MemoryGb = None,
    link: LinkText = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    compute_ms: ComputeMs = None,
    price: Price = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Estimate memory, FLOPs and bytes sent per step of a run.

    With --link, predict the step time too: some steps are measured on this machine, unless --compute-ms is given.
    """
    from samebits.config.load import load
    from samebits.parallel.exchange.link import parse_link
    from samebits.recipes.catalog import find

    found = find(source)
    config = load(found.config_class, found.layers, list(overrides or [])).config
    given = {"--nodes": nodes, "--gpus": gpus, "--compute-ms": compute_ms, "--price": price}
    parsed = parse_link(link, "--link") if link is not None else None
    size = _size(procs, nodes, gpus, given, has_link=parsed is not None)
    from samebits.engine.dataset_info import find_dataset_info
    from samebits.report.console import Console
    from samebits.scaling.plan_table import plan_values, show

    try:
        dataset_info = find_dataset_info(found, config)
    except DataError as error:
        cause = "\n".join(filter(None, [error.slots.get("cause"), _why_data(found.recipe)]))
        raise error.with_slots(cause=cause) from error
    planned = plan_values(config, lambda: found.build(config, dataset_info), size, memory_gb)
    if parsed is not None:
        parts = found.build(config, dataset_info)
        measured = (source, list(overrides or []), gpus or 1, compute_ms)
        planned["step_time"] = _step_time(config, parts, parsed, nodes or 1, price, measured)
    if as_json:
        print(json.dumps(planned))
        return
    console = Console(sys.stdout, strict=True)
    show(console, found.name, planned)
    if parsed is not None:
        from samebits.scaling.step_time.table import show_step

        show_step(console, planned["step_time"])


def _size(procs: int, nodes: int | None, gpus: int | None, given: dict[str, Any], *, has_link: bool) -> int:
    """Return the number of processes."""
    names = [name for name, value in given.items() if value is not None]
    if not has_link and names:
        raise ConfigError(f"{names[0]} needs --link", fix="Add the link between machines: --link 100Gbit,5us")
    if not has_link:
        return procs
    size = (nodes or 1) * (gpus or 1)
    if procs not in (1, size):
        raise ConfigError(
            f"--procs {procs} contradicts --nodes and --gpus, which are {size} processes", fix="Remove --procs."
        )
    if size > MAX_PROCS:
        raise ConfigError(
            f"--nodes and --gpus are {size} processes", allowed=f"up to {MAX_PROCS}", fix="Set fewer --nodes."
        )
    return size


def _step_time(
    config: RunConfig,
    parts: Parts,
    link: Link,
    nodes: int,
    price: float | None,
    measured: tuple[str, list[str], int, float | None],
) -> dict[str, Any]:
    from samebits.scaling.step_time.model import MachineGroup, StepCosts
    from samebits.scaling.step_time.table import StepPlan, step_values
    from samebits.scaling.step_time.traffic import check_countable

    check_countable(config)
    source, overrides, per_node, compute_ms = measured
    if compute_ms is not None:
        # Adding on a GPU is fast; a GPU needs no core to compute.
        costs, samples, size = StepCosts(0.0, compute_ms / 1e3, 0.0, 0.0, None), _num_samples(config, parts), 0
    else:
        costs, samples, size = _measured(config, source, overrides, per_node)
    machines = MachineGroup(nodes, per_node, size, link)
    return step_values(StepPlan(config, parts.model.to("meta"), costs, machines, samples, price))


def _num_samples(config: RunConfig, parts: Parts) -> int | None:
    """Return the size of the training set; None if its data is not here."""
    from samebits.engine.build import open_data

    try:
        return len(open_data(config, parts, train=True))
    except DataError:
        return None


def _measured(config: RunConfig, source: str, overrides: list[str], per_node: int) -> tuple[StepCosts, int, int]:
    """Measure in processes of this machine, as many as a machine of the plan has, but no more than it can hold.

    Returns:
        The costs, the number of training samples, and the number of processes if further ones would change the costs.
    """
    import torch

    from samebits.config.process_range import ProcessRange
    from samebits.launch.start import launch_here
    from samebits.launch.stopped import raise_if_stopped
    from samebits.scaling.step_time.costs import costs_from_json, measure_costs

    is_on_gpu = config.device != "cpu" and torch.cuda.is_available()
    # Two, so that the work of sending can be measured, unless there is one GPU only.
    size = min(per_node, torch.cuda.device_count()) if is_on_gpu else max(2, min(per_node, MOST * num_cores()))
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "costs.json"
        code = launch_here(ProcessRange(size, size), config, measure_costs, (source, overrides, out))
        raise_if_stopped(code)
        if code or not out.is_file():
            raise LaunchError(
                "the step could not be measured", fix="Run it alone: samebits train, or set --compute-ms."
            )
        values = json.loads(out.read_text(encoding="utf-8"))
    return costs_from_json(values), values["samples"], 0 if is_on_gpu else size


def _why_data(recipe: str) -> str:
    """Return why a plan reads data, and how to plan without."""
    from samebits.recipes.makers import list_makers

    why = "the size of the model depends on the data, such as its number of classes"
    if recipe not in (maker.recipe for maker in list_makers()):
        return why
    return f"{why}\nsynthetic data is enough: samebits data make {recipe} --out DIR"
