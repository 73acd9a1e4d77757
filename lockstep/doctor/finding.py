"""What the doctor found: one line for each thing looked at, with what to do where it is wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Verdict = Literal["ok", "note", "warning", "problem"]
WIDTH = 80


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What: "shared memory".
        value: What it is: "64 MB".
        verdict: ok; note: worth knowing; warning: it may be slow or fail later; problem: training can't work.
        do: What to do about it.
    """

    check: str
    value: str
    verdict: Verdict = "ok"
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def merged(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Every machine's findings as one list: what all machines have in common once, what differs by machine.

    Args:
        by_rank: Each rank's findings, in the order in which they were made.
        hosts: Each rank's machine.
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
        verdicts = {(finding.verdict, finding.do) for finding in groups}
        if len(groups) == 1:
            joined.extend(groups)
        elif len(verdicts) == 1:
            text = "; ".join(f"{finding.value} ({', '.join(where)})" for finding, where in [*groups.items()][:4])
            more = f"; {len(groups) - 4} more like them" if len(groups) > 4 else ""
            joined.append(replace(next(iter(groups)), value=text + more))
        else:
            for finding, where in groups.items():
                joined.append(Finding(check, f"{finding.value} ({', '.join(where)})", finding.verdict, finding.do))
    return joined


def table(findings: Sequence[Finding]) -> list[str]:
    """The findings for people, at most 80 columns wide where the words allow it."""
    first = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        verdict = finding.verdict if finding.verdict in ("ok", "note") else finding.verdict.upper()
        room = WIDTH - first - 12
        value, *rest = _wrapped(finding.value, room)
        lines.append(f"{verdict:<8} {finding.check:<{first}}  {value}".rstrip())
        lines.extend(f"{'':<8} {'':<{first}}  {line}" for line in rest)
        for place, line in enumerate(_wrapped(finding.do, room - 4) if finding.do else []):
            lines.append(f"{'':<8} {'':<{first}}  {'do  ' if place == 0 else '    '}{line}")
    return lines


def verdict_line(findings: Sequence[Finding]) -> str:
    """One line on the whole."""
    problems = sum(finding.verdict == "problem" for finding in findings)
    warnings = sum(finding.verdict == "warning" for finding in findings)
    if not problems and not warnings:
        return "all well"
    return f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(20, width), break_long_words=False, break_on_hyphens=False) or [""]
