"""Find the run folders below a folder, and keeps their summaries in the user's cache, so that a table is quick.

The cache holds a summary and the sizes and times of the files that it was read from. It is written beside no run: run
folders may belong to others. Without a cache, or with a damaged one, everything is read again.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from samebits.config.plain_file import parse_json, read_plain
from samebits.errors import CheckpointError, ConfigError, SamebitsError, cannot_read
from samebits.run_views.state import newest_write, state_of
from samebits.run_views.summary import FILES, RunSummary, read_summary
from samebits.storage.run_folder import write_atomically
from samebits.storage.run_lock import LOCK
from samebits.storage.run_path import check_utf8, is_published, no_run
from samebits.version import __version__

MAX_RUNS = 100_000
_MAX_DEPTH = 3  # runs/sweep/trial
_MAX_CACHE_BYTES = 512 * 1024 * 1024
_SETTLED_S = 300.0
_FORMAT = 2
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
        raise cannot_read(ConfigError, folder, error, "Give the folder that holds your run folders.") from None
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
        raise cannot_read(CheckpointError, run, error, "Make it a folder that this user can read.") from None
    if not is_run(run, names):
        raise no_run(run)
    check_utf8(run)


def read_summaries(folder: Path) -> list[RunSummary]:
    """Return the summaries of all runs below a folder.

    Raises:
        ConfigError: The folder does not exist or cannot be read.
    """
    runs = find_runs(folder)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    place = Path(os.path.expanduser(home)) / "samebits" / "runs" / f"{name}.json"
    known = _read_cache(place)
    kept: dict[str, Any] = {}
    summaries, is_changed = [], False
    for run in runs:
        key, signature, summary = str(run.absolute()), _signature(run), None
        entry = kept[key] = known.get(key)
        if isinstance(entry, dict) and entry.get("signature") == signature and isinstance(entry.get("summary"), dict):
            with suppress(ValueError, TypeError):
                summary = RunSummary.from_plain({**entry["summary"], "path": str(run)})
        if summary is None:
            summary, is_changed = read_summary(run), True
            kept[key] = {"signature": signature, "summary": summary.to_plain()}
        elif summary.state != "done":
            # The state can change without a change of the files: a process ends, or time passes.
            is_locked = signature[FILES.index(LOCK)][0] > 0
            if is_locked or summary.state == "running" or time.time() - newest_write(run) < _SETTLED_S:
                summary.state, summary.reason = state_of(run, is_complete=False)
        summaries.append(summary)
    if is_changed or kept.keys() != known.keys():
        # A read-only home folder or a full disk only costs time at the next call.
        with suppress(OSError, SamebitsError, ValueError):
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(place, json.dumps({"format": _FORMAT, "version": __version__, "runs": kept}).encode())
    return summaries


def _below(folder: Path, depth: int) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        # Sorted, since os.scandir has no order and MAX_RUNS cuts the list.
        for entry in sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name):
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


def _signature(run: Path) -> list[list[int]]:
    """Return size and time of each file that a summary is read from."""
    found = []
    for name in FILES:
        try:
            status = os.stat(f"{run}/{name}")
            found.append([status.st_size, status.st_mtime_ns])
        except OSError:
            found.append([-1, 0])
    return found


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_plain(path, _MAX_CACHE_BYTES))
    except (OSError, ValueError):
        return {}
    # A summary of another version may lack values, or have others.
    if not isinstance(content, dict) or [content.get("format"), content.get("version")] != [_FORMAT, __version__]:
        return {}
    runs = content.get("runs")
    return runs if isinstance(runs, dict) else {}
