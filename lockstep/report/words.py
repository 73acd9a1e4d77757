"""Figures as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Metrics that are shares of 1, and are shown in percent.
_SHARES = ("top", "accuracy", "precision", "recall")


def block(title: str, rows: Mapping[str, str]) -> str:
    """A title, and below it one indented line for each fact, their names aligned. Empty facts are left out."""
    rows = {name: value for name, value in rows.items() if value}
    width = max((len(name) for name in rows), default=0)
    lines = [title]
    for name, value in rows.items():
        first, *rest = value.splitlines()
        lines.append(f"  {name:<{width}}  {first}")
        lines.extend(f"  {'':<{width}}  {line}" for line in rest)
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """A length of time: "4.2 s", "21 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def clock(seconds: float | None) -> str:
    """Time that is left, as a clock shows it: "0:09", "12:30", "2:05:00"; "-:--" where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    whole = math.ceil(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def metric_name(name: str) -> str:
    """A metric's name as the head of a column: "top1" -> "top-1"."""
    return f"top-{name[3:]}" if name.startswith("top") and name[3:].isdigit() else name.replace("_", " ")


def metric_value(name: str, value: float) -> str:
    """A metric's value: shares in percent, all else with 3 decimals or, if small or large, 4 digits."""
    if not math.isfinite(value):
        return str(value)
    if name.startswith(_SHARES) or name.endswith(_SHARES):
        return f"{value:.2%}"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 10_000 else f"{value:.3e}"
