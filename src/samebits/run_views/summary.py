"""A run in one row, with its state and events, from the small files of its folder; and the run folders below a
folder.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import psutil

from samebits.errors import CheckpointError, ConfigError, cannot_read
from samebits.plain_file import as_dict, number, read_part, shorten
from samebits.provenance.record import BEST_FILE
from samebits.provenance.run_files import RunFiles
from samebits.run_views.values import count, numbers, text
from samebits.scratch import is_running
from samebits.storage.run_folder import check_utf8, is_published, no_run
from samebits.storage.run_lock import LOCK, OWNER, holder_of

# What happened during a run, from its logs: starts, faults, restarts, warnings, evaluations and its end.


Kind = Literal["start", "restart", "fault", "warning", "note", "evaluation", "stop", "done"]

_MAX_LOG_BYTES = 512 * 1024  # of each log, its end
_MAX_LOGS = 64
_MAX_EVENTS = 400
_MAX_CHARS = 2000
# A fault ends the other ranks too. Their logs have an error then, and the launcher reports the first one.
_CONSEQUENCE_S = 30.0
_LAUNCHER = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_RANK = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) +[\w.]+: (.*)"
)
_RANK_LOG = re.compile(r"rank-(\d{1,6})\.log")
_FAULT = re.compile(r"(?:[a-z]+ )?error: |hang: |rank \d+ \(host .*\) was killed by signal ")
_RESTART = re.compile(r"restart \d|continuing with |another node has joined")
# What a rank logs, level and text, by kind; the first that matches counts.
_KINDS: dict[Kind, re.Pattern[str]] = {
    "fault": re.compile("ERROR|CRITICAL"),
    "stop": re.compile(r"\w+ stopped after step"),
    "warning": re.compile("WARNING"),
    "evaluation": re.compile(r"\w+ evaluation after epoch "),
    "start": re.compile(r"\w+ training from step \d+ of \d+"),
    "done": re.compile(r"\w+ complete after step \d+"),
    "note": re.compile(""),
}


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
        is_consequence = event.kind == "fault" and any(
            abs(event.at - at) < _CONSEQUENCE_S for at in faults
        )
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
        kind: Kind = (
            "fault" if _FAULT.match(content) else "restart" if _RESTART.match(content) else "note"
        )
        events.append(Event(_time(match[1]), kind, shorten(content, _MAX_CHARS)))
    return events


def last_of_rank0(run: Path) -> Event | None:
    """Return the last entry of rank 0's log that is a start, a stop, a fault or the end."""
    found = [
        event
        for event in _rank_events(run, 0, _LOG_TAIL_BYTES)
        if event.kind in ("start", "stop", "fault", "done")
    ]
    return found[-1] if found else None


def first_time(run: Path) -> float | None:
    """Return the time of the first entry of rank 0's log."""
    head = read_part(run / "logs" / "rank-0.log", 64, is_end=False).decode("utf-8", "replace")
    found = re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),", head)
    return (_time(found[1]) or None) if found else None


def _rank_events(run: Path, rank: int, num_bytes: int = _MAX_LOG_BYTES) -> Iterator[Event]:
    for match, rest in _entries(run / "logs" / f"rank-{rank}.log", _RANK, num_bytes):
        content = "\n".join([match[3], *rest])
        kind = next(kind for kind, form in _KINDS.items() if form.match(f"{match[2]} {content}"))
        if kind == "evaluation":
            content = content.partition(":")[0]
        elif content.startswith("ended by "):  # the traceback follows; its last line has the reason
            content = f"rank {rank} {match[3]}: {content.rpartition(chr(10))[2]}"
        yield Event(_time(match[1]), kind, shorten(content, _MAX_CHARS), rank)


def _entries(
    path: Path, form: re.Pattern[str], num_bytes: int
) -> Iterator[tuple[re.Match[str], list[str]]]:
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


# The state of a run, from its lock and its logs: running, stopped, failed or done. Nothing is locked or written.


State = Literal["running", "stopped", "failed", "done"]

# On another host, whose processes are not visible from here: since a run writes records and logs, but not during an
# evaluation, which may take long.
_SILENT_S = 3600.0
_RESTART_S = 120.0  # between the end of the processes and the lock of the restarted rank 0
_LOG_TAIL_BYTES = 16 * 1024
_WRITTEN = ("metrics.jsonl", "logs/rank-0.log", "logs/launcher.log", LOCK)


def state_of(run: Path, *, is_complete: bool) -> tuple[State, str]:
    """Return the state of a run, and for a failed run the reason, as far as its logs have one.

    A run is complete if it has a `result.json`.
    """
    if is_complete:
        return "done", ""
    holder = holder_of(run / LOCK) or holder_of(run / OWNER)
    if holder is not None and _lives(run, *holder):
        return "running", ""
    launcher = read_launcher_log(run, _LOG_TAIL_BYTES)
    if launcher and launcher[-1].kind == "restart" and time.time() - launcher[-1].at < _RESTART_S:
        return "running", ""
    last = last_of_rank0(run)
    fault = next((event for event in reversed(launcher) if event.kind == "fault"), None)
    if fault is not None and (last is None or last.kind == "fault" or last.at <= fault.at):
        return "failed", fault.title
    if last is not None and last.kind == "fault":
        return "failed", last.title
    if holder is not None:  # a process that ends in an orderly way empties the file
        return "failed", f"process {holder[0]} on {holder[1]} was killed"
    return "stopped", ""


def newest_write(run: Path) -> float:
    """Return the Unix time at which a run last wrote a record or a log; 0 if it has none."""
    times = [0.0]
    for name in _WRITTEN:
        with suppress(OSError):
            times.append(os.stat(run / name).st_mtime)
    return max(times)


def _lives(run: Path, pid: int, host: str) -> bool:
    if host != os.uname().nodename:
        return time.time() - newest_write(run) < _SILENT_S
    if not is_running(pid):
        return False
    with suppress(psutil.Error, OSError):
        # Another process may have got the number. The one that took the lock started before it wrote the file.
        return float(psutil.Process(pid).create_time()) < os.stat(run / LOCK).st_mtime + 60.0
    return True


# A run in one row: recipe, state, step, metrics, time, settings and hash, from the small files of its folder.


# of metrics.jsonl: the second size if the first has no evaluation
_TAIL_BYTES = 32 * 1024, 1024 * 1024
_MAX_SETTINGS = 1000
_NO_METRICS = ("step", "epoch")


@dataclass
class RunSummary:
    """A run in one row. Texts and numbers come from files of unknown origin."""

    path: Path  #: The run folder.
    recipe: str = ""  #: Name of the recipe or preset.
    state: State = "stopped"  #: running, stopped, failed or done.
    reason: str = ""  #: Why it failed, one line.
    step: int = 0  #: Steps done.
    num_steps: int = 0  #: Steps of the whole run; 0 if unknown.
    epoch: float = 0.0  #: Epochs done.
    #: Metrics of the last evaluation, by name.
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: str = (
        ""  #: Name of the metric by which the best evaluation is chosen; empty if unknown.
    )
    best: float | None = None  #: Its best value.
    train_loss: float | None = None  #: Loss of the last recorded step.
    started: float | None = None  #: Unix time of the start, seconds.
    #: Wall-clock time of the command that completed the run, or its whole training time if that is longer; training
    #: time of a run that is not complete.
    took_s: float | None = None
    procs: int = 0  #: World size, as of the last start.
    weights_sha256: str = ""  #: Hash of the final weights; empty if the run is not complete.

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings by dotted name. Read when they are needed: YAML takes longer than all the rest."""
        return settings_of(RunFiles(self.path, is_tolerant=True))

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name or str(self.path)

    def to_plain(self) -> dict[str, Any]:
        """Return the summary as plain JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"run": self.name, **values, "path": str(self.path), "settings": self.settings}


def read_summary(run: Path) -> RunSummary:
    """Read a run in one row. What is missing or damaged is left out."""
    return summary_of(RunFiles(run, is_tolerant=True))


def summary_of(files: RunFiles) -> RunSummary:
    """Return a run in one row, from its files, which are read as far as they can be."""
    run = files.path
    result = files.result
    environment = files.environment
    found = RunSummary(run, text(environment.get("name")) or text(result.get("name")))
    found.recipe = found.recipe or Path(str(found.settings.get("recipe", ""))).name
    # config.yaml is written once. In a copied folder, its time is that of the copy.
    times = [first_time(run)]
    with suppress(OSError):
        times.append(os.stat(run / "config.yaml").st_mtime)
    found.started = min((each for each in times if each), default=None)
    found.procs = count(as_dict(environment.get("world")).get("size"))
    _add_best(found, files.read_json(BEST_FILE))
    if result:
        found.step = found.num_steps = count(result.get("steps"))
        found.metrics = numbers(result.get("metrics"))
        _add_best(found, result.get("best"))
        seconds = numbers(result.get("seconds"))
        found.took_s = max(
            (seconds[name] for name in ("all", "training") if name in seconds), default=None
        )
        found.weights_sha256 = text(result.get("weights_sha256"))[:64]
    _add_records(found, files, is_complete=bool(result))
    found.monitor = found.monitor or next((name for name in found.metrics if name != "loss"), "")
    found.state, found.reason = state_of(run, is_complete=bool(result))
    return found


def settings_of(files: RunFiles) -> dict[str, Any]:
    """Return the settings in `config.yaml` by dotted name, shortened; empty if the file is missing or damaged."""
    settings = list(files.settings.items())[:_MAX_SETTINGS]
    return {shorten(name, 120): _plain(value) for name, value in settings}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        converted = number(value)
        return str(value)[:80] if converted is None else value
    return shorten(
        value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    )


def _add_best(found: RunSummary, best: object) -> None:
    plain = as_dict(best)
    if metric := text(plain.get("metric")):
        found.monitor = shorten(metric, 80)
        found.best = number(plain.get("value"))


def _add_records(found: RunSummary, files: RunFiles, *, is_complete: bool) -> None:
    """Add step, epoch, loss and time from the last records, and metrics that the result does not have."""
    for num_bytes in _TAIL_BYTES:
        records = files.last_records(num_bytes)
        train = records.get("train", {})
        evaluation = records.get("eval", {})
        if train and evaluation:
            break
    last = max(evaluation, train, key=lambda record: count(record.get("step")))
    step = count(last.get("step"))
    found.epoch = number(last.get("epoch")) or 0.0
    found.train_loss = number(train.get("loss"))
    found.took_s = number(train.get("seconds")) if found.took_s is None else found.took_s
    found.metrics = found.metrics or {
        name: value for name, value in numbers(evaluation).items() if name not in _NO_METRICS
    }
    if not is_complete:
        epochs = number(found.settings.get("epochs")) or 0.0
        limit = count(found.settings.get("max_steps"))
        found.step = step
        rate = step / found.epoch if found.epoch > 0 else math.inf
        found.num_steps = count(round(rate * epochs)) if rate < 1e15 else limit
        found.num_steps = min(found.num_steps, limit) if limit else found.num_steps
    elif not last:
        found.epoch = number(found.settings.get("epochs")) or 0.0


# Find the run folders below a folder.


MAX_RUNS = 100_000
_MAX_DEPTH = 3  # runs/grid/run
# Beside config.yaml, which other programs write too.
_MARKS = frozenset({"environment.json", "metrics.jsonl", "result.json", "checkpoints", LOCK})


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders in a folder and up to two levels below it, or the folder itself if it is one.

    Raises:
        ConfigError: The folder does not exist or cannot be read.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise cannot_read(
            ConfigError, folder, error, "Give the folder that holds your run folders."
        ) from None
    if is_run(folder, names):
        return [folder]
    return list(_below(folder, 1))[:MAX_RUNS]


def is_run(folder: Path, names: list[str]) -> bool:
    """Return whether a folder with these entries is a run folder."""
    has_mark = "config.yaml" in names and not _MARKS.isdisjoint(names)
    return (has_mark and not is_published(names)) or (LOCK in names and "logs" in names)


def check_run(run: Path) -> None:
    """Check that a path is a run folder."""
    try:
        names = os.listdir(run)
    except (FileNotFoundError, NotADirectoryError):
        raise no_run(run) from None
    except OSError as error:
        raise cannot_read(
            CheckpointError, run, error, "Make it a folder that this user can read."
        ) from None
    if not is_run(run, names):
        raise no_run(run)
    check_utf8(run)


def read_summaries(folder: Path) -> list[RunSummary]:
    """Return the summaries of all runs below a folder.

    Raises:
        ConfigError: The folder does not exist or cannot be read.
    """
    return list(map(read_summary, find_runs(folder)))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        # Sorted, since os.scandir has no order and MAX_RUNS cuts the list.
        for entry in sorted(
            (entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name
        ):
            if not entry.is_dir():
                continue
            path = folder / entry.name
            try:
                names = os.listdir(path)
            except OSError:
                continue
            if is_run(path, names):
                yield path
            elif depth < _MAX_DEPTH and not entry.is_symlink():  # a link may lead back
                yield from _below(path, depth + 1)
