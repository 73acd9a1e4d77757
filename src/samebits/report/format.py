"""Numbers, durations and blocks of text formatted for the console."""

import math
import re
import textwrap
from collections.abc import Collection, Mapping

from samebits.errors import printable

COLUMNS = 80
SHARE = "share of time"  # the name of values that `share` formats, for `metric_value`
# Metrics between 0 and 1 that are shown in percent.
_SHARES = ("top", "accuracy", "precision", "recall")
# a metric of a named validation set
_OF_SET = re.compile(r"([A-Za-z][\w-]*)\.([A-Za-z]\w*)", re.ASCII)


def block(
    title: str, rows: Mapping[str, str], whole: Collection[str] = (), width: int = COLUMNS
) -> str:
    """Format a title and an indented line per row, with aligned labels and long lines wrapped between words.

    In a row of several lines, the continuation of a wrapped line is indented.

    Args:
        title, width: First line, which is not wrapped, and columns.
        rows, whole: Texts by label, without empty ones, and labels of rows that stay whole, since users copy them.
    """
    rows = {name: value for name, value in rows.items() if value}
    first = max(map(len, rows), default=0)
    lines = [title]
    for name, value in rows.items():
        text = value.splitlines() if name in whole else _cut(value, width - 4 - first)
        lines += [
            f"  {label:<{first}}  {line}"
            for label, line in zip([name, *[""] * len(text)], text, strict=False)
        ]
    return "\n".join(lines)


def _cut(text: str, width: int) -> list[str]:
    lines = text.splitlines()
    indent = "  " if len(lines) > 1 else ""
    wrapper = textwrap.TextWrapper(
        # Hyphens are part of names and commands that users copy, so no line ends at one.
        max(width, 20),
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent=indent,
    )
    return [piece for line in lines for piece in wrapper.wrap(line)]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 process", "1,024 processes"."""
    ending = "" if number == 1 else "es" if noun.endswith(("ss", "batch")) else "s"
    return f"{number:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Format a length of time: "4.2 s", "21 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def clock(seconds: float | None) -> str:
    """Format the time left as a clock: "0:09", "12:30", "2:05:00"; "-:--" if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    # Rounded up, so that the clock shows 0:00 only at the end.
    whole = math.ceil(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def metric_name(name: str) -> str:
    """Format a metric's name for a column: "top1" -> "top-1", "night.top1" -> "night top-1"."""
    if (of_set := _OF_SET.fullmatch(name)) is not None:
        return f"{of_set[1]} {metric_name(of_set[2])}"
    return (
        f"top-{name[3:]}"
        if name.startswith("top") and name[3:].isdigit()
        else name.replace("_", " ")
    )


def metric_value(name: str, value: float) -> str:
    """Format a metric's value: shares as 12.34%, losses with 4 digits, all others with 3 or 4 decimals.

    Powers of ten are written only from 10,000 on and below 0.0001. COCO's -1, for an average over no ground truth, is
    written as "none".
    """
    if (of_set := _OF_SET.fullmatch(name)) is not None:
        return metric_value(of_set[2], value)
    if name.startswith(("AP", "AR")) and value == -1:
        return "none"
    if not math.isfinite(value):
        return str(value)
    if name == SHARE:
        return share(value)
    if _is_share(name):
        return f"{value:.2%}"
    if abs(value) >= 10_000:
        return f"{value:.3e}"
    if _is_loss(name):
        return f"{value:#.4g}".rstrip(".")  # itself turns to powers of ten below 0.0001
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3f}"
    return f"{value:.4f}" if abs(value) >= 0.0001 else f"{value:.1e}"


def share(value: float) -> str:
    """Format a part of the time or of the steps, which is measured less precisely than a metric: "12.3%"."""
    return f"{value:.1%}"


def metrics_line(values: Mapping[str, float]) -> str:
    """Format metrics in one line: "loss 0.5036  top-1 80.00%". Details, whose names have a slash, are left out."""
    return "  ".join(
        f"{printable(metric_name(name))} {metric_value(name, value)}"
        for name, value in values.items()
        if "/" not in name
    )


def metric_width(name: str) -> int:
    """Return the maximum width of a metric's values: from 0.0001 to 10,000, losses also below."""
    return 9 if _is_loss(name) else 7 if _is_share(name) else 6


def _is_share(name: str) -> bool:
    return name.startswith(_SHARES) or name.endswith(_SHARES)


def _is_loss(name: str) -> bool:
    return "loss" in name


_LOWER_IS_BETTER = re.compile(
    r"loss|error|distance|perplexity|\b([cw]er|mae|mape|r?mse|nll)\b", re.IGNORECASE
)


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better, by its name."""
    return _LOWER_IS_BETTER.search(metric) is not None
