"""Figures as a person reads them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping

COLUMNS = 80
# Metrics that are shares of 1, and are shown in percent.
_SHARES = ("top", "accuracy", "precision", "recall")


def block(title: str, rows: Mapping[str, str]) -> str:
    """A title, and below it one indented line for each fact, their names aligned. Empty rows are left out."""
    rows = {name: value for name, value in rows.items() if value}
    width = max((len(name) for name in rows), default=0)
    lines = [title]
    for name, value in rows.items():
        first, *rest = value.splitlines()
        lines.append(f"  {name:<{width}}  {first}")
        lines.extend(f"  {'':<{width}}  {line}" for line in rest)
    return "\n".join(lines)


def fitted(rows: Mapping[str, str], whole: Collection[str] = ()) -> dict[str, str]:
    """The rows of a block with their lines cut between words, so that it is no wider than 80 columns.

    Of a fact of several lines, what goes on from one that was cut is indented. Empty rows are left out.

    Args:
        rows: The rows by name.
        whole: Names of those that stay as they are, as they are there to be copied.
    """
    rows = {name: value for name, value in rows.items() if value}
    room = COLUMNS - 4 - max(map(len, rows), default=0)
    return {name: value if name in whole else _cut(value, room) for name, value in rows.items()}


def _cut(text: str, width: int) -> str:
    lines = text.splitlines()
    indent = "  " if len(lines) > 1 else ""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
    return "\n".join(piece for line in lines for piece in wrapper.wrap(line))


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
    """A metric's value: shares in percent, losses with 4 digits, all else with 3 or 4 decimals.

    Powers of ten are written only from 10,000 on and below 0.0001.
    """
    if not math.isfinite(value):
        return str(value)
    if _is_share(name):
        return f"{value:.2%}"
    if abs(value) >= 10_000:
        return f"{value:.3e}"
    if _is_loss(name):
        return f"{value:#.4g}".rstrip(".")  # itself turns to powers of ten below 0.0001
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3f}"
    return f"{value:.4f}" if abs(value) >= 0.0001 else f"{value:.1e}"


def metric_width(name: str) -> int:
    """Columns that a metric's values take at most: from 0.0001 to 10,000, losses also below."""
    return 9 if _is_loss(name) else 7 if _is_share(name) else 6


def _is_share(name: str) -> bool:
    return name.startswith(_SHARES) or name.endswith(_SHARES)


def _is_loss(name: str) -> bool:
    return "loss" in name
