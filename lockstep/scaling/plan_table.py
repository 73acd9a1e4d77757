"""The figures of a plan, and a table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config.schema import RunConfig
from lockstep.engine.build import build_parts
from lockstep.engine.parts import Parts
from lockstep.report.idle import idle_row
from lockstep.scaling.example import example
from lockstep.scaling.plan import Sizes, bytes_sent, memory, pass_through

GB = 1e9


def figures(config: RunConfig, build: Callable[[], Parts], num_procs: int, memory_gb: float | None) -> dict[str, Any]:
    """What a run would take, as plain JSON; sizes in bytes.

    Args:
        config: The settings.
        build: Gives the recipe's parts.
        num_procs: Processes.
        memory_gb: What each may hold, GB; None: nothing is said of what fits.

    Raises:
        DataError: The recipe gives no shape of its input, and there is no data to take it from.
    """
    inputs = example(config, build_parts(config, build))
    one, sizes = pass_through(config, build, inputs, config.micro_batch)
    without = _never_with_fsdp(config)
    num_micro = -(-config.global_batch // config.micro_batch)
    ways: dict[str, dict[str, Any]] = {
        way: {
            "memory": memory(config, sizes, one.activations, num_procs, way),
            "sent_bytes": bytes_sent(config, sizes, num_procs, way),
        }
        for way in (("ddp",) if without else ("ddp", "fsdp"))
    }
    for way in ways.values():
        way["total_bytes"] = sum(way["memory"].values())
        if memory_gb is not None:
            way["largest_micro_batch"] = _largest(config, sizes, one.activations, num_procs, way, memory_gb * GB)
    return {
        "parameters": sizes.total,
        "trained": sizes.trained,
        "global_batch": config.global_batch,
        "micro_batch": config.micro_batch,
        "micro_batches": num_micro,
        "procs": num_procs,
        "idle_procs": max(0, num_procs - num_micro),
        "flops_a_step": one.flops * config.global_batch // config.micro_batch,
        "memory_gb": memory_gb,
        "ways": ways,
        "no_fsdp_with": without,
    }


def _never_with_fsdp(config: RunConfig) -> str | None:
    if config.batch_norm == "sync":
        return "batch_norm=sync"
    if config.compress != "none":
        return f"compress={config.compress}"
    return "compile=true" if config.compile else None


def _largest(
    config: RunConfig, sizes: Sizes, activations: int, num_procs: int, way: Mapping[str, Any], limit: float
) -> int:
    """The most samples of a micro-batch that fit, 0 if none does: activations grow with them, all else stays."""
    fixed = way["total_bytes"] - way["memory"]["activations"]
    if config.batch_norm == "sync":  # all samples of a process are held at once, however they are cut
        return config.micro_batch if way["total_bytes"] <= limit else 0
    return max(0, min(config.global_batch, int((limit - fixed) * config.micro_batch / activations)))


def table(name: str, planned: Mapping[str, Any]) -> list[str]:
    """Lines of at most 80 columns."""
    ways, procs = planned["ways"], planned["procs"]
    names = list(ways) if procs > 1 else ["ddp"]
    lines = [
        f"{name}: {planned['parameters']:,} parameters, {planned['trained']:,} of them trained",
        f"a step: {planned['micro_batches']} micro-batches of {planned['micro_batch']}, "
        f"{planned['flops_a_step'] / 1e9:,.1f} GFLOP, {procs} process{'es' if procs > 1 else ''}",
        *idle_row(procs, planned["global_batch"], planned["micro_batch"]).splitlines(),
        "",
        f"{'MB of a process':<16}" + "".join(f"{way:>12}" for way in names),
    ]
    for entry in ways["ddp"]["memory"]:
        lines.append(f"{entry:<16}" + "".join(f"{ways[way]['memory'][entry] / 1e6:>12,.1f}" for way in names))
    lines.append(f"{'all':<16}" + "".join(f"{ways[way]['total_bytes'] / 1e6:>12,.1f}" for way in names))
    lines.append(f"{'sent a step':<16}" + "".join(f"{ways[way]['sent_bytes'] / 1e6:>12,.1f}" for way in names))
    if planned["no_fsdp_with"] and procs > 1:
        lines += ["", f"not by fsdp: it can't be combined with {planned['no_fsdp_with']}"]
    if planned["memory_gb"] is not None:
        lines += ["", *_fitting(planned, names)]
    return lines


def _fitting(planned: Mapping[str, Any], names: list[str]) -> list[str]:
    lines = []
    for way in names:
        most = planned["ways"][way]["largest_micro_batch"]
        fits = f"up to micro_batch={most}" if most else "no micro-batch at all (docs/memory.md: what to do)"
        fits += ", all of global_batch" if most == planned["global_batch"] else ""
        lines.append(f"in {planned['memory_gb']:g} GB {way} has room for {fits}")
    return lines
