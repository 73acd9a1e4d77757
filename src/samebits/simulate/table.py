"""The table of `samebits simulate`: what a rank sends and holds, by number of ranks."""

from collections.abc import Sequence

from rich.table import Table

from samebits.simulate.run import Simulated

FOOTNOTE = """\
messages  most that one rank sends in a step
rounds    most messages of a step that wait for each other
sent      most bytes that one rank sends in a step, relative to the gradient
memory    of a rank beside the weights
seconds   for a step of all ranks, one after another, in this process"""


def table(found: Sequence[Simulated]) -> Table:
    """Lay out one row per simulated run."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(7):
        rows.add_column(justify="right", no_wrap=True)
    rows.add_row("ranks", "messages", "rounds", "sent", "memory", "seconds", "weights", style="dim")
    for each in found:
        rows.add_row(
            "-".join(map(world_text, each.worlds)),
            f"{each.messages:,}",
            f"{each.rounds:,}",
            f"{each.num_bytes / each.gradient_bytes:.3f}",
            f"{each.rank_bytes / 1e6:,.{0 if each.rank_bytes >= 1e8 else 1}f} MB",
            f"{each.seconds / each.steps:,.2f}",
            each.sha256[:7],
        )
    return rows


def world_text(machines: Sequence[int]) -> str:
    """Format the number of ranks of each machine: 4, 2x4 or 3+1."""
    if len(machines) > 1 and len({*machines}) == 1:
        return f"{len(machines)}x{machines[0]}"
    return "+".join(map(str, machines))


def links(found: Sequence[Simulated]) -> list[str]:
    """Return a line for each run on several machines: the way of exchanging, and what has left a machine."""
    return [
        f"{world_text(each.worlds[0])}: {each.way}; counted: {each.link_bytes / each.gradient_bytes:.3f} "
        f"in {each.link_messages:,} messages"
        for each in found
        if each.link_messages
    ]


def conclusion(found: Sequence[Simulated]) -> str:
    """Return a sentence: whether all runs have ended in the same weights."""
    if len({each.sha256 for each in found}) == 1:
        return f"The weights are equal, bit for bit, in all {len(found)} runs."
    return "The weights differ: this is a fault of Samebits, please report it with this command."
