"""The figures of several worlds as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(figures: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    """One row for each way and number of processes.

    Args:
        figures: What `measure` wrote, by name and number of processes.

    Returns:
        Lines: samples a second; efficiency, which is that over the ideal (the same way's smallest world, times the
        processes); and a step's time, with the shares of it for reading samples, for sums under way that backward did
        not hide, for waiting for the slowest process, and for all else.
    """
    first = max(len("job"), *map(len, figures))
    lines = [f"{'':<{first}}  procs  samples/s  efficiency   step ms  read  send  wait  compute"]
    for name, rows in figures.items():
        base_size = min(rows)
        base = rows[base_size]["samples_per_s"] / base_size
        for size, row in rows.items():
            step = row["step_s"]
            reading = row["reading_s"] / step
            sending = row["sending_s"] / step
            waiting = row["waiting_s"] / step - sending
            efficiency = row["samples_per_s"] / size / base
            is_known = name != "ddp"  # torch's DDP adds up inside of backward
            lines.append(
                f"{name:<{first}}  {size:>5}  {row['samples_per_s']:>9,.0f}  {efficiency:>10.0%}"
                f"  {1000 * step:>8,.1f}  {reading:>4.0%}"
                f"  {format(sending, '.0%') if is_known else '-':>4}"
                f"  {format(waiting, '.0%') if is_known else '-':>4}"
                f"  {format(max(0.0, 1 - reading - sending - waiting), '.0%') if is_known else '-':>7}"
            )
    return lines
