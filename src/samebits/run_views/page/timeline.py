"""Where the time of a run went, and its events on a line."""

from collections.abc import Sequence
from typing import Any

from samebits.report.format import share as format_share
from samebits.run_views.events import Event, Kind
from samebits.run_views.history import RunHistory

_MAX_LISTED = 120
# Row of each kind on the line, from the top, its sign, and its name.
_SIGNS: dict[Kind, tuple[int, str, str]] = {
    "fault": (14, "M-6-6L6 6M6-6L-6 6", "fault"),
    "warning": (14, "M0-6L6 5H-6Z", "warning"),
    "stop": (14, "M-5-5H5V5H-5Z", "stop"),
    "restart": (38, "M0-6L6 0L0 6L-6 0Z", "restart"),
    "start": (38, "M-5-6L6 0L-5 6Z", "start"),
    "done": (38, "M-6 0L-2 5L6-5", "complete"),
    "evaluation": (38, "M0-6V6", "evaluation"),
    "note": (38, "M0-2V2", "note"),
}
_LINES_ONLY = ("fault", "done", "evaluation", "note")


def time_parts(run: RunHistory) -> list[dict[str, Any]]:
    """Return the share of each part of the training time; nothing for a run without these times."""
    seconds = run.seconds
    training = run.training_s
    if not training:
        return []
    waited = seconds.get("data_wait")
    if waited is None:
        waits = run.curves.get("train", "data_wait")
        waited = training * sum(waits.values) / len(waits) if len(waits) else 0.0
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
    shown = {key: value for key, value in {"computing": computing, **parts, **other}.items() if value > 0}
    total, at, found = sum(shown.values()), 0.0, []
    for key, value in shown.items():
        share = 100 * value / total
        place = {"start": f"{at:.3f}", "width": f"{share:.3f}"}
        found.append({"name": key, "seconds": value, "share": format_share(share / 100), **place})
        at += share
    return found


def event_line(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return the place of each event on a line of time, and those that are no evaluations for a table below it."""
    known = [event for event in events if event.at > 0]
    if not known:
        return None
    first, last = known[0].at, known[-1].at
    span = (last - first) or 1.0
    listed = [event for event in known if event.kind != "evaluation"]
    note = f" The first {len(listed) - _MAX_LISTED:,} events are left out." if len(listed) > _MAX_LISTED else ""
    num_evaluations = len(known) - len(listed)
    summary = f"{num_evaluations:,} evaluation{'s' if num_evaluations != 1 else ''}, shown as short lines."
    return {
        "first": first,
        "last": last,
        "marks": [(event, f"{2 + 96 * (event.at - first) / span:.2f}", _sign(event)) for event in known],
        "listed": [(event, _sign(event)) for event in listed[-_MAX_LISTED:]],
        "note": (summary if num_evaluations else "") + note,
    }


def _sign(event: Event) -> dict[str, Any]:
    y, path, name = _SIGNS[event.kind]
    return {"y": y, "path": path, "name": name, "is_line": event.kind in _LINES_ONLY}
