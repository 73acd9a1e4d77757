"""What happened during a run, from its logs: starts, faults, restarts, warnings, evaluations and its end."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from samebits.run_views.files import read_part, shorten

Kind = Literal["start", "restart", "fault", "warning", "note", "evaluation", "stop", "done"]

_MAX_LOG_BYTES = 512 * 1024  # of each log, its end
_MAX_LOGS, _MAX_EVENTS = 64, 400
_MAX_CHARS = 2000
# A fault ends the other ranks too. Their logs have an error then, and the launcher reports the first one.
_CONSEQUENCE_S = 30.0
_LAUNCHER = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_RANK = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) +[\w.]+: (.*)")
_RANK_LOG = re.compile(r"rank-(\d{1,6})\.log")
_FAULT = re.compile(r"(?:[a-z]+ )?error: |hang: |rank \d+ \(host .*\) was killed by signal ")
_RESTART = re.compile(r"restart \d|continuing with |another node has joined")
_STARTED, _COMPLETE = re.compile(r"training from step (\d+) of (\d+)"), re.compile(r"complete after step \d+")


@dataclass(frozen=True)
class Event:
    """An entry of a log."""

    at: float  #: Unix time, seconds; logs have the local time of their machine.
    kind: Kind  #: What it is.
    text: str  #: Its text, which may have several lines.
    rank: int | None = None  #: The rank that logged it; None: the launcher.

    @property
    def title(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0]


def read_events(run: Path) -> list[Event]:
    """Return the events of a run folder in the order of time. Of repeated entries, the first one stays."""
    events = read_launcher_log(run)
    with suppress(OSError):
        names = os.listdir(run / "logs")
        ranks = sorted(int(match[1]) for name in names if (match := _RANK_LOG.fullmatch(name)))
        events += [event for rank in ranks[:_MAX_LOGS] for event in _rank_events(run, rank)]
    faults = [event.at for event in events if event.kind == "fault" and event.rank is None]
    # All ranks log these. After a recovery in the step, rank 0 is a process that was another rank, with that one's log.
    of_rank0 = {(event.kind, event.title) for event in events if event.rank == 0}
    kept: list[Event] = []
    seen: dict[tuple[str, str], float] = {}
    for event in sorted(events, key=lambda event: (event.at, event.rank is not None)):
        is_consequence = event.kind == "fault" and any(abs(event.at - at) < _CONSEQUENCE_S for at in faults)
        if event.rank is not None and is_consequence:
            continue
        key = (event.kind, event.title)
        if event.kind == "start" and event.rank is not None and ", rank 0 of" not in event.title:
            continue
        if event.kind in ("evaluation", "done") and event.rank and key in of_rank0:
            continue
        if event.at - seen.get(key, float("-inf")) < 1.0 or (event.rank and key in seen):
            continue
        seen[key] = event.at
        kept.append(event)
    return kept[-_MAX_EVENTS:]


def read_launcher_log(run: Path, num_bytes: int = _MAX_LOG_BYTES) -> list[Event]:
    """Return the entries of `launcher.log`, at most so many bytes from its end."""
    events = []
    for match, rest in _entries(run / "logs" / "launcher.log", _LAUNCHER, num_bytes):
        content = "\n".join([match[2], *rest])
        kind: Kind = "fault" if _FAULT.match(content) else "restart" if _RESTART.match(content) else "note"
        events.append(Event(_time(match[1]), kind, shorten(content, _MAX_CHARS)))
    return events


def last_of_rank0(run: Path, num_bytes: int = 16 * 1024) -> Event | None:
    """Return the last entry of rank 0's log that is a start, a stop, a fault or the end."""
    found = [event for event in _rank_events(run, 0, num_bytes) if event.kind in ("start", "stop", "fault", "done")]
    return found[-1] if found else None


def first_time(run: Path) -> float | None:
    """Return the time of the first entry of rank 0's log."""
    head = read_part(run / "logs" / "rank-0.log", 64, is_end=False).decode("utf-8", "replace")
    found = re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),", head)
    return (_time(found[1]) or None) if found else None


def _rank_events(run: Path, rank: int, num_bytes: int = _MAX_LOG_BYTES) -> Iterator[Event]:
    for match, rest in _entries(run / "logs" / f"rank-{rank}.log", _RANK, num_bytes):
        kind: Kind = "note"
        level, content = match[2], "\n".join([match[3], *rest])
        if level in ("ERROR", "CRITICAL"):
            kind = "fault"
            if content.startswith("ended by "):  # the traceback follows; its last line has the reason
                content = f"rank {rank} {content.partition(chr(10))[0]}: {content.rpartition(chr(10))[2]}"
        elif content.startswith("stopped after step"):
            kind = "stop"
        elif level == "WARNING":
            kind = "warning"
        elif content.startswith("evaluation after epoch "):
            kind, content = "evaluation", content.partition(":")[0]
        elif _STARTED.match(content):
            kind = "start"
        elif _COMPLETE.match(content):
            kind = "done"
        yield Event(_time(match[1]), kind, shorten(content, _MAX_CHARS), rank)


def _entries(path: Path, form: re.Pattern[str], num_bytes: int) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Yield each entry of a log: the match of its first line, and its other lines."""
    current: tuple[re.Match[str], list[str]] | None = None
    # The part may begin in the middle of a character.
    content = read_part(path, num_bytes, is_end=True).decode("utf-8", "replace")
    # Not splitlines, which also breaks at characters such as U+2028 within a message.
    for line in content.split("\n"):
        match = form.match(line)
        if match is not None:
            if current is not None:
                yield current
            current = (match, [])
        elif current is not None and line.strip() and len(current[1]) < 1000:
            current[1].append(line)
    if current is not None:
        yield current


def _time(text: str) -> float:
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0
