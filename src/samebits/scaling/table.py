"""Lay out the table of `samebits scale`, and draw conclusions from it."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

# Variant -> number of processes -> what `measure` wrote.
Measurements = Mapping[str, Mapping[int, Mapping[str, Any]]]

# Smallest share of a step to report, and smallest difference in speed that is not noise.
NOTABLE_SHARE = 0.2
NOTABLE_GAIN = 0.05

FOOTNOTE = """\
efficiency  samples/s per process, relative to the first row of the same name
data        share of a step waiting for data
comm        share of a step in communication not hidden by the backward pass
wait        share of a step waiting for the slowest process
compute     the rest; torch's DDP does not report comm, wait and compute"""


def table(measurements: Measurements) -> Table:
    """Lay out one row per variant and number of processes."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    for _ in range(8):
        rows.add_column(justify="right", no_wrap=True)
    names = ("procs", "samples/s", "efficiency", "step ms", "data", "comm", "wait", "compute")
    rows.add_row("", *names, style="dim")
    for name, sizes in measurements.items():
        for size, row in sizes.items():
            data, comm, wait = _shares(row)
            is_known = name != "ddp"  # torch's DDP communicates inside the backward pass
            shares = [data, *((comm, wait, max(0.0, 1 - data - comm - wait)) if is_known else ())]
            rows.add_row(
                name,
                str(size),
                f"{row['samples_per_s']:,.0f}",
                f"{_efficiency(sizes, size):.0%}",
                f"{1000 * row['step_s']:,.1f}",
                *(f"{share:.0%}" for share in shares),
                *([] if is_known else ["-"] * 3),
            )
    return rows


def conclusions(measurements: Measurements, num_cores: int | None) -> list[str]:
    """Return what the measurements show, one sentence per line.

    Args:
        num_cores: Number of CPU cores of this machine if it trains on them; None on GPUs.
    """
    speeds = {
        (name, size): row["samples_per_s"]
        for name, sizes in measurements.items()
        for size, row in sizes.items()
    }
    (name, size), speed = max(speeds.items(), key=lambda item: item[1])
    slowest = min(other for _, other in speeds)
    base = speeds.get((name, slowest))
    gain = (
        f", {speed / base:.2f} times {name} on {slowest}"
        if base is not None and size != slowest
        else ""
    )
    lines = [f"Fastest: {name} on {_processes(size)}, {speed:,.0f} samples/s{gain}."]
    first = next(iter(measurements))
    most = max(measurements[first])
    for other in measurements:
        if other != first and most in measurements[other]:
            lines.append(_compared(first, other, speeds[first, most] / speeds[other, most], most))
    data, comm, wait = _shares(measurements[first][most])
    if first != "ddp":
        causes = {"data": data, "communication": comm, "waiting for the slowest process": wait}
        cause = max(causes, key=lambda name: causes[name])
        if causes[cause] >= NOTABLE_SHARE:
            lines.append(
                f"{first} on {_processes(most)} spends {causes[cause]:.0%} of a step on {cause}."
            )
    if num_cores is not None and most > num_cores:
        lines.append(
            f"This machine has {num_cores} core{'s' if num_cores > 1 else ''}: more processes share them."
        )
    return lines


def _compared(first: str, other: str, ratio: float, size: int) -> str:
    if abs(ratio - 1) < NOTABLE_GAIN:
        return f"{first} and {other} are equally fast on {_processes(size)} (within {NOTABLE_GAIN:.0%})."
    return f"{first} has {ratio:.0%} of the speed of {other} on {_processes(size)}."


def _processes(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def _efficiency(sizes: Mapping[int, Mapping[str, Any]], size: int) -> float:
    """Return the throughput per process, relative to the smallest world."""
    smallest = min(sizes)
    return float(
        sizes[size]["samples_per_s"] / size / (sizes[smallest]["samples_per_s"] / smallest)
    )


def _shares(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the shares of a step spent on waiting for data, communication, and waiting for the slowest process."""
    comm = row["sending_s"] / row["step_s"]
    return row["reading_s"] / row["step_s"], comm, row["waiting_s"] / row["step_s"] - comm
