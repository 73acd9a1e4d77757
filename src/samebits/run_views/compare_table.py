"""The console output of `samebits compare`."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from samebits.run_views.compare import SECTIONS, Comparison
from samebits.run_views.repeats import group_by_setting, seed_lines
from samebits.run_views.table import STYLES, cut, one_line

_MIN_VALUE, _MAX_VALUE, _MAX_NAME = 14, 44, 28
_GAP = 2


def comparison_tables(comparison: Comparison, width: int) -> list[Table | Text]:
    """Lay out a comparison: a table for each group of runs that fits side by side."""
    names = max((len(one_line(row.name)) for row in comparison.rows), default=0) + 2
    first = min(max(names, 12), _MAX_NAME)
    num_fit = max(1, (width - first) // (_MIN_VALUE + _GAP))
    blocks: list[Table | Text] = []
    for start in range(0, len(comparison.runs), num_fit):
        if blocks:
            blocks.append(Text())
        shown = range(start, min(start + num_fit, len(comparison.runs)))
        value_width = min(_MAX_VALUE, (width - first) // len(shown) - _GAP)
        blocks.append(_table(comparison, shown, (first, value_width)))
    if groups := group_by_setting([run.summary for run in comparison.runs]):
        lines = seed_lines(groups, width)
        blocks += [Text(), Text(lines[0], "bold"), *map(Text, lines[1:])]
    return blocks


def _table(comparison: Comparison, shown: Sequence[int], widths: tuple[int, int]) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(no_wrap=True, width=widths[0])
    for _ in shown:
        table.add_column(overflow="fold", width=widths[1])
    heads = [cut(f"{comparison.letters[index]} {one_line(comparison.runs[index].name)}", widths[1]) for index in shown]
    table.add_row("", *(Text(head, "bold") for head in heads))
    for section in SECTIONS:
        rows = comparison.section(section)
        if section == "settings":
            same = f"{comparison.num_equal} equal" + ("" if rows else ", none differ")
            table.add_row(Text("settings", "bold"), Text(same, "dim"))
        elif rows:
            table.add_row(Text(section, "bold"))
        for row in rows:
            values = []
            for index in shown:
                is_other = not row.is_equal and row.values[index] != row.values[0]
                style = STYLES.get(row.values[index], "") if row.name == "state" else "yellow" if is_other else ""
                values.append(Text(one_line(row.values[index])[:400], style))
            table.add_row(Text(cut(f"  {one_line(row.name)}", widths[0])), *values)
    return table
