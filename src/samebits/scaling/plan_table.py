"""Estimate what `samebits plan` reports, and print it as a table."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.table import Table

from samebits.config.schema import RunConfig, first_met
from samebits.data.division import num_micro_batches
from samebits.engine.build import build_parts, first_inputs, open_data
from samebits.engine.parts import Parts
from samebits.report.console import Console
from samebits.report.speed import idle_row
from samebits.scaling.plan import Sizes, memory, pass_through

GB = 1e9


def plan_values(
    config: RunConfig, build: Callable[[], Parts], num_procs: int, memory_gb: float | None
) -> dict[str, Any]:
    """Compute what a run would take, as plain JSON; sizes in bytes.

    Args:
        build: Returns the recipe's parts.
        memory_gb: Memory of each process, GB; None: do not compute what fits.

    Returns:
        The estimates by name, as plain JSON; sizes in bytes.

    Raises:
        DataError: The recipe has no `input_shape`, and there is no data.
    """
    parts = build_parts(config, build)
    if parts.input_shape is not None:
        inputs = torch.zeros(1, *parts.input_shape)
    else:
        inputs = first_inputs(open_data(config, parts, train=True))
    cost, sizes = pass_through(config, build, inputs, config.micro_batch)
    no_fsdp_with = first_met(config, "batch_norm=sync", "compress!=none", "compile=true") or None
    num_micro = num_micro_batches(config.global_batch, config.micro_batch)
    ways: dict[str, dict[str, Any]] = {
        way: {"memory": memory(config, sizes, cost.activations, num_procs, way)}
        for way in (("ddp",) if no_fsdp_with else ("ddp", "fsdp"))
    }
    for way in ways.values():
        way["total_bytes"] = sum(way["memory"].values())
        if memory_gb is not None:
            way["largest_micro_batch"] = _largest(
                config, sizes, cost.activations, num_procs, way, memory_gb * GB
            )
    return {
        "parameters": sizes.total,
        "trained": sizes.trained,
        "global_batch": config.global_batch,
        "micro_batch": config.micro_batch,
        "micro_batches": num_micro,
        "procs": num_procs,
        "idle_procs": max(0, num_procs - num_micro),
        "flops_a_step": cost.flops * config.global_batch // config.micro_batch,
        "memory_gb": memory_gb,
        "ways": ways,
        "no_fsdp_with": no_fsdp_with,
    }


def _largest(
    config: RunConfig,
    sizes: Sizes,
    activations: int,
    num_procs: int,
    way: Mapping[str, Any],
    limit: float,
) -> int:
    """Return the largest micro-batch that fits, 0 if none does. Of all parts, only activations grow with it."""
    fixed = way["total_bytes"] - way["memory"]["activations"]
    if config.batch_norm == "sync":  # a process holds all of its samples at once
        return config.micro_batch if way["total_bytes"] <= limit else 0
    return max(0, min(config.global_batch, int((limit - fixed) * config.micro_batch / activations)))


def show(console: Console, name: str, planned: Mapping[str, Any]) -> None:
    """Print a plan. `planned`: the result of `plan_values`."""
    ways = planned["ways"]
    procs = planned["procs"]
    names = list(ways) if procs > 1 else ["ddp"]
    batches = planned["micro_batches"]
    console.block(
        f"{name} on {procs} process{'es' if procs > 1 else ''}",
        {
            "model": f"{planned['parameters']:,} parameters, {planned['trained']:,} of them trained",
            "step": f"{batches} micro-batch{'es' if batches > 1 else ''} of up to {planned['micro_batch']}, "
            f"{planned['flops_a_step'] / 1e9:,.1f} GFLOP",
            "idle": idle_row(procs, planned["global_batch"], planned["micro_batch"]),
        },
    )
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    for _ in names:
        rows.add_column(justify="right", no_wrap=True, min_width=10)
    rows.add_row("MB per process", *names, style="dim")
    for entry in ways["ddp"]["memory"]:
        rows.add_row(entry, *(f"{ways[way]['memory'][entry] / 1e6:,.1f}" for way in names))
    rows.add_row(
        "total", *(f"{ways[way]['total_bytes'] / 1e6:,.1f}" for way in names), style="bold"
    )
    console.say("")
    console.draw(rows)
    notes = _fitting(planned, names) if planned["memory_gb"] is not None else []
    if planned["no_fsdp_with"] and procs > 1:
        notes.append(f"fsdp cannot be combined with {planned['no_fsdp_with']}.")
    if notes:
        console.say("\n".join(["", *notes]))


def _fitting(planned: Mapping[str, Any], names: list[str]) -> list[str]:
    lines = []
    for way in names:
        most = planned["ways"][way]["largest_micro_batch"]
        fits = (
            f"micro_batch={most} or less fits"
            if most
            else "no micro-batch fits (see docs/memory.md)"
        )
        fits += ", the whole global_batch" if most == planned["global_batch"] else ""
        lines.append(f"With {planned['memory_gb']:g} GB, {way}: {fits}.")
    return lines
