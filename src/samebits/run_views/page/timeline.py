"""Where the time of a run went, and its events on a line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from samebits.report.format import duration
from samebits.run_views.events import Event, Kind
from samebits.run_views.history import RunHistory
from samebits.run_views.page.markup import Markup, element, table

_MAX_LISTED = 120
# Row of each kind on the line, from the top, and its sign.
_SIGNS: dict[Kind, tuple[int, str]] = {
    "fault": (14, "M-6-6L6 6M6-6L-6 6"),
    "warning": (14, "M0-6L6 5H-6Z"),
    "stop": (14, "M-5-5H5V5H-5Z"),
    "restart": (38, "M0-6L6 0L0 6L-6 0Z"),
    "start": (38, "M-5-6L6 0L-5 6Z"),
    "done": (38, "M-6 0L-2 5L6-5"),
    "evaluation": (38, "M0-6V6"),
    "note": (38, "M0-2V2"),
}
_NAMES: dict[Kind, str] = {
    "start": "start",
    "restart": "restart",
    "fault": "fault",
    "warning": "warning",
    "note": "note",
    "evaluation": "evaluation",
    "stop": "stop",
    "done": "complete",
}
_LINES_ONLY = ("fault", "done", "evaluation", "note")


def time_bar(run: RunHistory) -> Markup | None:
    """Draw the share of each part of the training time; None for a run without these times."""
    parts = _parts(run)
    total = sum(seconds for _, seconds in parts)
    if not total:
        return None
    rects, keys, at = [], [], 0.0
    for index, (name, seconds) in enumerate(parts):
        share = 100 * seconds / total
        title = element("title", None, f"{name}: {duration(seconds)}, {share:.1f}%")
        rects.append(
            element(
                "g",
                None,
                element("rect", {"x": f"{at:.3f}%", "width": f"{share:.3f}%", "height": 26, "class": f"f{index}"}),
                title,
            )
        )
        at += share
        keys.append(
            (
                element("span", {"class": "key"}, element("i", {"class": f"box k{index}"}), name),
                duration(seconds),
                f"{share:.1f}%",
            )
        )
    bar = element("svg", {"class": "bar", "role": "img", "aria-label": "Parts of the time, listed below"}, rects)
    return element("div", None, bar, table(keys, kind="times"))


def _parts(run: RunHistory) -> list[tuple[str, float]]:
    """Return name and seconds of each part of the time, which do not overlap."""
    seconds = run.seconds
    training = seconds.get("training", run.curves.get("train", "seconds").last or 0.0)
    if not training:
        return []
    waited = seconds.get("data_wait")
    if waited is None:
        share = run.curves.get("train", "data_wait")
        waited = training * sum(share.values) / len(share) if len(share) else 0.0
    parts = {"waiting for data": min(waited, training)}
    whole = seconds.get("all", 0.0)
    # Communication is measured since the last start: for a run of several starts, its share of the whole is unknown.
    is_one_start = len([event for event in run.events if event.kind in ("start", "restart")]) <= 1
    if is_one_start and whole >= training:
        parts |= {
            "communication": seconds.get("sending", 0.0),
            "waiting for slower processes": seconds.get("rank_wait", 0.0),
        }
    computing = max(training - sum(parts.values()), 0.0)
    name = "start, evaluation and checkpoints" if is_one_start else "starts, evaluation, checkpoints, repeated steps"
    other = {name: whole - training} if whole > training else {}
    ordered = {"computing": computing, **parts, **other}
    return [(name, value) for name, value in ordered.items() if value > 0]


def event_line(events: Sequence[Event]) -> Markup | None:
    """Draw events on a line of time, with a table of those that are no evaluations below it."""
    known = [event for event in events if event.at > 0]
    if not known:
        return None
    first, last = known[0].at, known[-1].at
    span = (last - first) or 1.0
    marks = [_mark(event, 2 + 96 * (event.at - first) / span) for event in known]
    line = element(
        "svg",
        {"class": "events", "role": "img", "aria-label": f"{len(known)} events, listed below"},
        element("line", {"x1": "2%", "x2": "98%", "y1": 38, "y2": 38, "class": "base"}),
        marks,
        element("text", {"x": "2%", "y": 66}, _time(first)),
        element("text", {"x": "98%", "y": 66, "text-anchor": "end"}, _time(last)) if last > first else None,
        element("text", {"x": "50%", "y": 66, "text-anchor": "middle"}, duration(span)) if last > first else None,
    )
    listed = [event for event in known if event.kind != "evaluation"]
    rows = [
        (_time(event.at), element("span", {"class": event.kind}, _NAMES[event.kind]), event.text)
        for event in listed[-_MAX_LISTED:]
    ]
    note = f"The first {len(listed) - _MAX_LISTED:,} events are left out." if len(listed) > _MAX_LISTED else None
    num_evaluations = len(known) - len(listed)
    summary = f"{num_evaluations:,} evaluation{'s' if num_evaluations != 1 else ''}, shown as short lines."
    return element(
        "div",
        None,
        line,
        element("p", {"class": "soft"}, summary if num_evaluations else "", f" {note}" if note else ""),
        table(rows, kind="log") if rows else None,
    )


def _mark(event: Event, percent: float) -> Markup:
    y, path = _SIGNS[event.kind]
    sign = element(
        "path",
        {
            "d": path,
            "class": f"e-{event.kind}",
            "stroke-width": 2.2 if event.kind in _LINES_ONLY else 0,
            "fill": "none" if event.kind in _LINES_ONLY else None,
        },
    )
    title = element("title", None, f"{_time(event.at)} {_NAMES[event.kind]}: {event.title}")
    # An inner drawing has its own origin, so that the sign can be at a share of the width.
    return element("svg", {"x": f"{percent:.2f}%", "y": y, "overflow": "visible"}, sign, title)


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
