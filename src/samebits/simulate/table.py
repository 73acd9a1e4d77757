"""The table of `samebits simulate`: what a rank sends and holds, by number of ranks, and how it grows."""

import math
from collections.abc import Callable, Sequence

from rich.table import Table

from samebits.simulate.run import Simulated

MIN_SIZES = 3  # for an exponent

FOOTNOTE = """\
messages  most that one rank sends in a step
rounds    most messages of a step that wait for each other
sent      most bytes that one rank sends in a step, relative to the gradient
memory    of a rank beside the weights
plan      time in which a rank plans a step
start     calls of the store by rank 0 until all ranks have joined
seconds   for a step of all ranks, one after another, in this process
W^x       growth with the number of ranks W, without the run of one;
          seconds ~ W^1: constant for a rank"""

_GROWING: tuple[tuple[str, Callable[[Simulated], float]], ...] = (
    ("messages", lambda found: found.messages),
    ("rounds", lambda found: found.rounds),
    ("sent", lambda found: found.num_bytes),
    ("memory", lambda found: found.rank_bytes),
    ("plan", lambda found: found.plan_s),
    ("start", lambda found: found.join_calls[0]),
    ("seconds", lambda found: found.seconds / found.steps),
)


def table(found: Sequence[Simulated]) -> Table:
    """Lay out one row per simulated run, and one for what grows."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(9):
        rows.add_column(justify="right", no_wrap=True)
    rows.add_row("ranks", *(name for name, _ in _GROWING), "weights", style="dim")
    for each in found:
        rows.add_row(
            "-".join(map(str, each.procs)),
            f"{each.messages:,}",
            f"{each.rounds:,}",
            f"{each.num_bytes / each.gradient_bytes:.3f}",
            f"{each.rank_bytes / 1e6:,.{0 if each.rank_bytes >= 1e8 else 1}f} MB",
            f"{each.plan_s * 1e3:,.2f} ms",
            f"{each.join_calls[0]:,}",
            f"{each.seconds / each.steps:,.2f}",
            each.sha256[:7],
        )
    if grows := exponents(found):
        rows.add_row("", *(f"W^{grows[name]:.2f}" if name in grows else "-" for name, _ in _GROWING), style="dim")
    return rows


def exponents(found: Sequence[Simulated]) -> dict[str, float]:
    """Fit how what a rank needs grows: the exponent of the number of ranks, by name.

    Args:
        found: Runs; those of one rank and those of changing numbers do not count.

    Returns:
        The slope of each value over the number of ranks, both as logarithms; empty with fewer than three numbers.
    """
    runs = [each for each in found if len(each.procs) == 1 and each.procs[0] > 1]
    if len({each.procs for each in runs}) < MIN_SIZES:
        return {}
    sizes = [math.log(each.procs[0]) for each in runs]
    fitted = {}
    for name, value in _GROWING:
        values = [value(each) for each in runs]
        if min(values) > 0:
            fitted[name] = _slope(sizes, [math.log(each) for each in values])
    return fitted


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((one - x) * (other - y) for one, other in zip(xs, ys, strict=True))
    return above / sum((one - x) ** 2 for one in xs)


def conclusion(found: Sequence[Simulated]) -> str:
    """Return a sentence: whether all runs have ended in the same weights."""
    if len({each.sha256 for each in found}) == 1:
        return f"The weights are equal, bit for bit, in all {len(found)} runs."
    return "The weights differ: this is a fault of Samebits, please report it with this command."
