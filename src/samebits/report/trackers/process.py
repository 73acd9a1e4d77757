"""The process of one tracker: `python -P -m samebits.report.trackers.process TRACKER RUN [--new]`.

    training process          metrics.jsonl          this process
    writes a record  -------> a line       --------> tracker.log, tracker.flush, position
    ends             ------- "done" on stdin ------> the last lines, tracker.finish

Nothing here imports torch. What a package prints goes to the log.
"""

import errno
import fcntl
import itertools
import json
import math
import os
import secrets
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samebits.config import document
from samebits.errors import SamebitsError
from samebits.plain_file import as_dict, open_plain, parse_json, read_plain
from samebits.report.records import CHECKPOINT, FILE_NAME, lines_of, record_in
from samebits.report.trackers.tracker import TrackedRun, Tracker, label, make_tracker
from samebits.storage.run_folder import write_atomically

# Read the records of a run folder as they are written, and remembers which of them a tracker has received.


_FIELDS = ("kind", "step", "epoch")
_DEVICE = ("gpu_use", "mfu")  # `report/speed.py`, which imports torch; mfu: of earlier versions


class Tail:
    """Yields the complete lines of a run's `metrics.jsonl` that are new since the last call.

    A resume or a rollback replaces the file. It is then read from its start.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FILE_NAME
        self._inode = 0
        self._offset = 0

    def new_records(self) -> Iterator[Mapping[str, Any]]:
        """Yield records that were not yielded before, except after the file was replaced."""
        try:
            # No link, and no FIFO: the run folder may be a stranger's.
            opened = open_plain(self._path, os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (
                errno.ENOENT,
                errno.EINVAL,
            ):  # it is not there yet, or is no regular file
                return
            raise
        with opened as file:
            status = os.fstat(file.fileno())
            # A new inode: a resume wrote a new file. A smaller size: the inode was used again.
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode = status.st_ino
                self._offset = 0
            file.seek(self._offset)
            # A line without its end is still being written, and is read whole the next time.
            for line in lines_of(file):
                self._offset += len(line)
                if (record := record_in(line)) is not None:
                    yield record


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a record under "kind/name", and its epoch.

    JSON's null is a value that is not finite, and becomes NaN. Only that of a device is not known, and left out.
    """
    kind = record.get("kind")
    values = {
        f"{kind}/{name}": math.nan if value is None else float(value)
        for name, value in record.items()
        if name not in _FIELDS
        and (isinstance(value, int | float) or (value is None and name not in _DEVICE))
    }
    return values | {"epoch": float(record.get("epoch") or 0.0)}


class ReadPosition:
    """Which records a tracker has received, in a file of the run folder; none if a new tracked run starts."""

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._path = path
        #: The tracked run, eight hex digits.
        self.id, self._logged = secrets.token_hex(4), dict[str, int]()
        self.is_resumed = False  #: Whether the file existed.
        if is_new:
            return
        try:
            content = parse_json(read_plain(path))
            logged = {str(kind): int(step) for kind, step in content["logged"].items()}
            # It becomes a part of file names and queries.
            self.id = bytes.fromhex(content["id"]).hex()
            self._logged = logged
            self.is_resumed = True
        # Broad, because the file may be a stranger's: nothing in it may prevent the tracker from starting.
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # there is none, or it is damaged: all records are sent to a new tracked run

    def is_due(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is new to the tracker. A resumed run repeats steps with equal values."""
        return int(record["step"]) > self._logged.get(str(record.get("kind")), -1)

    def note(self, record: Mapping[str, Any]) -> None:
        """Note that the tracker received a record."""
        self._logged[str(record.get("kind"))] = record["step"]

    def save(self) -> None:
        """Write the file. Raises CheckpointError if it cannot be written."""
        write_atomically(self._path, json.dumps({"id": self.id, "logged": self._logged}).encode())


FOLDER = "trackers"  # of all trackers, in the run folder
POLL_S = 2.0
FAILED = "failed:"  # begins the last line of the log of a tracker that has failed
_GROUP = 100  # records that are stored together
_LAST_CALL_S = 600.0  # after the end of the training, for uploads
# A scheduler or terminal may send these to every process of a job. Records of the last steps are still to come then.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(name: str, run: Path, *, is_new: bool) -> int:
    """Follow a run until it ends; return the exit code. `is_new`: whether training starts from its first step."""
    folder = run / FOLDER / label(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Before the tracker's package is imported, which may install handlers of its own or start processes.
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        os.nice(10)  # it runs while the training waits
        # Some packages look for GPUs, and a context there would take memory from the training.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if (link := find_way_out(folder)) is not None:
            raise ValueError(f"{link} is a link to a place outside of the run folder")
        _lock(folder.with_name(f"{folder.name}.lock"))
        position = ReadPosition(folder.with_name(f"{folder.name}.json"), is_new=is_new)
        tracker = make_tracker(name)
        tracker.start(_describe(run, folder, position))
        # The position is saved only after `start`: a tracked run that was never opened must get a new id.
        position.save()
        _follow(run, tracker, position)
    # SystemExit too: a package that calls sys.exit would otherwise end without a message.
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = (
            error.what if isinstance(error, SamebitsError) else f"{type(error).__name__}: {error}"
        )
        # The last line of the log, which the training process reads.
        print(FAILED, " ".join(reason.split())[:1000], file=sys.stderr, flush=True)
        end_all()  # a package's threads and children may never end
    return 0


def _follow(run: Path, tracker: Tracker, position: ReadPosition) -> None:
    """Send records until the training has ended."""
    tail = Tail(run)
    outcome: str | None = None
    while True:
        is_last = outcome is not None  # asked before the file is read: no record follows the end
        due = filter(position.is_due, tail.new_records())
        # In groups: a resumed run may send many thousand records at once, and silence would count as a hang.
        while group := list(itertools.islice(due, _GROUP)):
            for record in group:
                if record.get("kind") != CHECKPOINT:  # it has no values
                    tracker.log(record["step"], values_of(record))
                position.note(record)
            tracker.flush()
            # After the flush: a record counts as received only when the package has stored it.
            position.save()
        if is_last:
            break
        outcome = _wait_for_end(POLL_S)
    if outcome not in ("done", "stopped"):
        outcome = "failed"
    result = parse_json(read_plain(run / "result.json")) if outcome == "done" else {}
    tracker.finish(outcome, as_dict(result))  # type: ignore[arg-type]  # one of the three


def _wait_for_end(seconds: float) -> str | None:
    """Wait for the word that training writes at its end: done, stopped or failed; None while it runs.

    A closed pipe means that it was killed.
    """
    if not select.select([0], [], [], seconds)[0]:
        return None
    # Nothing else would end a package whose upload never returns.
    timer = threading.Timer(_LAST_CALL_S, end_all)
    timer.daemon = True
    timer.start()
    return os.read(0, 100).decode().strip() or "failed"


def find_way_out(folder: Path) -> Path | None:
    """Return a link through which a tracker would write outside of its folder: a stranger's run folder may have one.

    That is a file of the folder itself, or a folder at any depth. W&B links files of finished runs to its own logs.
    """
    inside = folder.resolve()
    for path in folder.rglob("*"):
        is_way = path.is_symlink() and (path.parent == folder or path.is_dir())
        if is_way and not path.resolve().is_relative_to(inside):
            return path
    return None


def end_all() -> None:
    """End this process and its children at once."""
    # Only if this process leads its group. Started by hand, it shares the group with the user's shell.
    if os.getpgid(0) == os.getpid():
        # SIGKILL, since packages ignore or delay SIGTERM for uploads that may never return.
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _describe(run: Path, folder: Path, position: ReadPosition) -> TrackedRun:
    config = run / "config.yaml"
    settings = document.parse(read_plain(config).decode(), str(config)).values
    report: Any = settings.get("report")
    project = report.get("project") if isinstance(report, Mapping) else None
    return TrackedRun(
        name=run.absolute().name,
        id=position.id,
        project=str(project) if project else None,
        recipe=Path(str(settings.get("recipe", ""))).stem,
        settings=settings,
        run_folder=run.absolute(),
        folder=folder.absolute(),
        is_resumed=position.is_resumed,
    )


def _lock(path: Path) -> None:
    """Wait until the tracker of this run's former process has ended, and lock the file until this process ends."""
    # The lock outlives this function: the descriptor stays open, and the kernel releases it at the end of the process.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fcntl.flock(os.open(path, flags, 0o666), fcntl.LOCK_EX)


if __name__ == "__main__":
    _, tracker, folder, *flags = sys.argv
    sys.exit(main(tracker, Path(folder), is_new=bool(flags)))
