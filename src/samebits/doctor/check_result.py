"""Results of `samebits doctor`: one per check, with a fix if something is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from samebits.errors import printable
from samebits.report.format import counted

Verdict = Literal["ok", "note", "warning", "problem"]
_STYLES: Mapping[Verdict, str] = {
    "ok": "green",
    "note": "cyan",
    "warning": "bold yellow",
    "problem": "bold red",
}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    check: str  #: Name of the check, such as "shared memory".
    value: str  #: Result, such as "64 MB".
    #: ok; note: for information; warning: may be slow or fail later; problem: training cannot work.
    verdict: Verdict = "ok"
    fix: str = ""  #: An imperative sentence; empty if there is nothing to do.

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON."""
        return asdict(self)


def merged(by_rank: Sequence[Sequence[CheckResult]], hosts: Sequence[str]) -> list[CheckResult]:
    """Merge the results of all ranks: one result if they are equal, one per host if they differ."""
    by_host: dict[str, Mapping[str, CheckResult]] = {}
    for host, results in zip(hosts, by_rank, strict=True):
        by_host.setdefault(host, {result.check: result for result in results})
    checks = dict.fromkeys(check for found in by_host.values() for check in found)
    joined: list[CheckResult] = []
    for check in checks:
        groups: dict[CheckResult, list[str]] = {}
        for host, found in by_host.items():
            if check in found:
                groups.setdefault(found[check], []).append(host)
        verdicts = {(result.verdict, result.fix) for result in groups}
        if len(groups) == 1:
            joined.extend(groups)
        elif len(verdicts) == 1:
            text = "; ".join(
                f"{result.value} ({', '.join(where)})" for result, where in [*groups.items()][:4]
            )
            more = f"; {len(groups) - 4} more" if len(groups) > 4 else ""
            joined.append(replace(next(iter(groups)), value=text + more))
        else:
            for result, where in groups.items():
                joined.append(
                    CheckResult(
                        check, f"{result.value} ({', '.join(where)})", result.verdict, result.fix
                    )
                )
    return joined


def table(results: Sequence[CheckResult]) -> Table:
    """Lay out results for the console: verdict, check and value, with the fix below the value."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for result in results:
        verdict = result.verdict if result.verdict in ("ok", "note") else result.verdict.upper()
        style = _STYLES[result.verdict]
        rows.add_row(Text(verdict, style), printable(result.check), printable(result.value))
        if result.fix:
            rows.add_row("", "", printable(f"fix  {result.fix}"))
    return rows


def verdict_line(results: Sequence[CheckResult]) -> str:
    """Summarize the results in one line."""
    problems = sum(result.verdict == "problem" for result in results)
    warnings = sum(result.verdict == "warning" for result in results)
    if not problems and not warnings:
        return "no problems found"
    return f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}"
