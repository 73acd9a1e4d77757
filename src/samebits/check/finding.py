"""Findings of a check: what differs, its cause, and what to do."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from samebits.config.load import short_path
from samebits.errors import printable


@dataclass(frozen=True)
class Finding:
    """One fault of a recipe."""

    what: str  #: What differs, where: "forward of `encoder.noise` differs between 1 and 2 processes at step 1".
    kind: str  #: A word for the cause, for programs: "generator", "clock", "loss is a sum".
    cause: str  #: Why, for the user.
    fix: str  #: What to do, an imperative sentence.
    file: str = ""  #: The user's source file; empty if it is not known.
    line: int = 0  #: The line in it.
    others: list[str] = field(default_factory=list)  #: Other lines that may have a part in it, each "FILE:LINE what".

    @property
    def place(self) -> str:
        """FILE:LINE, or an empty text."""
        return f"{short_path(Path(self.file))}:{self.line}" if self.file else ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON."""
        return asdict(self)


def not_portable(operations: Mapping[str, Any]) -> list[Finding]:
    """Return a finding for each operation of `listed_operations` that has no portable form."""
    found = []
    for each in operations["refused"]:
        file, _, line = each.get("where", "").partition(": ")[0].rpartition(":")
        found.append(
            Finding(each["what"], "not portable", each["cause"], each["fix"], file, int(line) if line.isdigit() else 0)
        )
    return found


def num_portable(operations: Mapping[str, Any]) -> str:
    """Return the number of portable operations, for the report."""
    return f"{operations['portable']} portable operations"


def table(passed: Sequence[str], findings: Sequence[Finding]) -> Table:
    """Lay the results out for the console."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    if passed:
        rows.add_row(Text("  ok", "green"), ", ".join(passed))
    for finding in findings:
        cause = f"{finding.cause} ({finding.place})" if finding.place else finding.cause
        slots = Table.grid(padding=(0, 2, 0, 0))
        for name, text in (("cause", cause), ("fix", finding.fix)):
            slots.add_row(Text(name, "bold"), Text(printable(text), overflow="fold"))
        if finding.others:
            slots.add_row(Text("or", "bold"), Text(printable("\n".join(finding.others)), overflow="fold"))
        rows.add_row(Text("  FAIL", "bold red"), Group(Text(printable(finding.what), overflow="fold"), slots))
    return rows
