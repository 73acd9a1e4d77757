"""Findings of `lockstep doctor`: one per check, with a fix if something is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.errors import printable

Verdict = Literal["ok", "note", "warning", "problem"]
_STYLES: Mapping[Verdict, str] = {"ok": "green", "note": "cyan", "warning": "bold yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Name of the check, such as "shared memory".
        value: Result, such as "64 MB".
        verdict: ok; note: for information; warning: may be slow or fail later; problem: training cannot work.
        fix: An imperative sentence; empty if there is nothing to do.
    """

    check: str
    value: str
    verdict: Verdict = "ok"
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON."""
        return asdict(self)


def merged(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Merge the findings of all machines: one finding if they are equal, one per machine if they differ.

    Args:
        by_rank: The findings of each rank, in the order of the checks.
        hosts: The host of each rank.
    """
    by_host: dict[str, Mapping[str, Finding]] = {}
    for host, findings in zip(hosts, by_rank, strict=True):
        by_host.setdefault(host, {finding.check: finding for finding in findings})
    checks = dict.fromkeys(check for found in by_host.values() for check in found)
    joined: list[Finding] = []
    for check in checks:
        groups: dict[Finding, list[str]] = {}
        for host, found in by_host.items():
            if check in found:
                groups.setdefault(found[check], []).append(host)
        verdicts = {(finding.verdict, finding.fix) for finding in groups}
        if len(groups) == 1:
            joined.extend(groups)
        elif len(verdicts) == 1:
            text = "; ".join(f"{finding.value} ({', '.join(where)})" for finding, where in [*groups.items()][:4])
            more = f"; {len(groups) - 4} more" if len(groups) > 4 else ""
            joined.append(replace(next(iter(groups)), value=text + more))
        else:
            for finding, where in groups.items():
                joined.append(Finding(check, f"{finding.value} ({', '.join(where)})", finding.verdict, finding.fix))
    return joined


def table(findings: Sequence[Finding]) -> Table:
    """Lay out findings for the console: verdict, check and value, with the fix below the value."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for finding in findings:
        verdict = finding.verdict if finding.verdict in ("ok", "note") else finding.verdict.upper()
        value: RenderableType = Text(printable(finding.value))
        if finding.fix:
            fix = Table.grid(padding=(0, 2, 0, 0))
            fix.add_row(Text("fix"), Text(printable(finding.fix), overflow="fold"))
            value = Group(value, fix)
        rows.add_row(Text(verdict, _STYLES[finding.verdict]), printable(finding.check), value)
    return rows


def verdict_line(findings: Sequence[Finding]) -> str:
    """Summarize the findings in one line."""
    problems = sum(finding.verdict == "problem" for finding in findings)
    warnings = sum(finding.verdict == "warning" for finding in findings)
    if not problems and not warnings:
        return "no problems found"
    return f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
