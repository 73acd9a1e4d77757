"""What `samebits plan --link` predicts, as JSON, and as a table with bars that fits 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table
from torch import nn

from samebits.config.schema import RunConfig
from samebits.data.micro_batches import num_micro_batches
from samebits.report.console import Console
from samebits.scaling.step_time.model import PAYS, MachineGroup, StepCosts, StepTime, last_that_pays, predict
from samebits.scaling.step_time.traffic import count_traffic

BAR_WIDTH = 24
MAX_NODES = 1024  # for the number that pays
# Letter in the bars, name, and what it is.
PARTS = {
    "reading": "reading samples in the training process",
    "compute": "forward and backward passes",
    "update": "the optimizer",
    "work": "sending and adding gradients in the processes",
    "latency": "waiting for messages to arrive",
    "bandwidth": "waiting for the link between machines",
}


@dataclass(frozen=True)
class StepPlan:
    """What to predict.

    Attributes:
        config: The settings.
        model: The model, on the meta device.
        costs: Of one process, for micro-batches of the settings' size.
        machines: The largest number of machines.
        num_samples: Training samples; None: unknown.
        price: Of a machine for an hour; None: unknown.
    """

    config: RunConfig
    model: nn.Module
    costs: StepCosts
    machines: MachineGroup
    num_samples: int | None = None
    price: float | None = None

    def at(self, nodes: int, config: RunConfig | None = None) -> StepTime:
        """Predict a step on another number of machines, or with other settings."""
        config = config or self.config
        # A pass takes time in proportion to its samples.
        share = config.micro_batch / self.config.micro_batch
        costs = replace(self.costs, reading_s=share * self.costs.reading_s, compute_s=share * self.costs.compute_s)
        machines = replace(self.machines, nodes=nodes)
        leaves = num_micro_batches(config.global_batch, config.micro_batch)
        traffic = count_traffic(config, self.model, nodes * machines.per_node, machines.per_node)
        return predict(costs, machines, traffic, leaves)


def step_values(plan: StepPlan) -> dict[str, Any]:
    """Predict steps on 1, 2, 4 ... machines, and what would help, as plain JSON."""
    nodes = plan.machines.nodes
    sizes = sorted({nodes, *(1 << power for power in range(nodes.bit_length()))})
    return {
        "link": str(plan.machines.link),
        "costs": asdict(plan.costs),
        "slowdown": plan.machines.slowdown,
        "rows": [_row(plan, size) for size in sizes],
        "pays_up_to": last_that_pays({size: plan.at(size).total_s for size in _useful_sizes(plan)}),
        "helps": _helps(plan),
    }


def _row(plan: StepPlan, nodes: int) -> dict[str, Any]:
    predicted = plan.at(nodes)
    step_s = predicted.total_s
    row: dict[str, Any] = {
        "nodes": nodes,
        "procs": nodes * plan.machines.per_node,
        "step_s": step_s,
        "samples_per_s": plan.config.global_batch / step_s,
        "parts": vars(predicted),
        "largest": predicted.largest,
    }
    if plan.num_samples is not None:
        row["epoch_s"] = plan.num_samples / row["samples_per_s"]
        if plan.price is not None:
            row["epoch_cost"] = row["epoch_s"] / 3600 * nodes * plan.price
    return row


def _useful_sizes(plan: StepPlan) -> list[int]:
    """Return the numbers of machines at which the busiest rank has fewer micro-batches than with one machine less."""
    per_node = plan.machines.per_node
    leaves = num_micro_batches(plan.config.global_batch, plan.config.micro_batch)
    most = min(-(-leaves // per_node), MAX_NODES)
    smallest: dict[int, int] = {}
    for nodes in range(1, most + 1):
        smallest.setdefault(-(-leaves // (nodes * per_node)), nodes)
    return list(smallest.values())


def _helps(plan: StepPlan) -> list[dict[str, Any]]:
    """Return settings that would shorten the step on all machines, with the share that each saves, best first."""
    config, size = plan.config, plan.machines.nodes * plan.machines.per_node
    variants: dict[str, dict[str, Any]] = {}
    if config.compress == "none":
        variants["compress=bf16"] = {"compress": "bf16"}
    even = -(-config.global_batch // size)
    if even < config.micro_batch:  # larger micro-batches would change the memory and leave ranks idle
        variants[f"micro_batch={even}"] = {"micro_batch": even}
    now_s = plan.at(plan.machines.nodes).total_s
    saved = {
        name: 1 - plan.at(plan.machines.nodes, config.model_copy(update=values)).total_s / now_s
        for name, values in variants.items()
    }
    best = sorted(saved.items(), key=lambda entry: -entry[1])
    return [{"setting": name, "saves": share} for name, share in best if share >= 0.01]


def show_step(console: Console, values: Mapping[str, Any]) -> None:
    """Print the prediction."""
    rows = values["rows"]
    has_cost = "epoch_cost" in rows[0]
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(5 + has_cost):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    cost = ["epoch cost"] if has_cost else []
    table.add_row("nodes", "procs", "step ms", "samples/s", "epoch s", *cost, "parts of the step", style="dim")
    for row in rows:
        costs = [f"{row['epoch_cost']:,.4g}"] if has_cost else []
        table.add_row(
            f"{row['nodes']:,}",
            f"{row['procs']:,}",
            f"{1e3 * row['step_s']:,.1f}",
            f"{row['samples_per_s']:,.0f}",
            f"{row['epoch_s']:,.1f}" if "epoch_s" in row else "-",
            *costs,
            bar(row["parts"]),
        )
    console.say("")
    console.table(table)
    console.say("\n" + "\n".join(_conclusions(values)))


def bar(parts: Mapping[str, float], width: int = BAR_WIDTH) -> str:
    """Draw the parts of a step as letters, such as ccccccbb.

    Args:
        parts: Seconds by name.
        width: Number of letters.
    """
    total = sum(parts.values())
    text, end = "", 0.0
    for name, seconds in parts.items():
        end += seconds / total
        text += name[0] * (round(end * width) - len(text))
    return text


def _conclusions(values: Mapping[str, Any]) -> list[str]:
    last = values["rows"][-1]
    used = [name for name in PARTS if any(name[0] in bar(row["parts"]) for row in values["rows"])]
    share = last["parts"][f"{last['largest']}_s"] / last["step_s"]
    nodes, pays = last["nodes"], values["pays_up_to"]
    lines = [f"{name[0]}  {PARTS[name]}" for name in used]
    lines += ["", f"On {nodes} machine{'s' if nodes > 1 else ''}, {share:.0%} of a step is {PARTS[last['largest']]}."]
    lines.append(f"From {pays} machine{'s' if pays > 1 else ''} on, another adds less than {PAYS:.0%} of its share.")
    lines += [f"{each['setting']} would save {each['saves']:.0%} of the step." for each in values["helps"]]
    return lines
