"""The members of a world that may change: the launcher names them, and each of its processes reads it.

    launcher    epochs.json: number, port of its store, workers in the order of their ranks   replaced for each epoch
    workers     main thread: waits for the next epoch after a loss, or between two steps
                watch thread: reads the file 50 times a second; an urgent epoch ends the present group

A worker is one process that the launcher has started, and its number is never used again. The file is in the launcher's
temporary folder, which only this user can read. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

WATCH_S = 0.02
# How long a worker that has lost a connection waits for the launcher to name the members.
NOTICE_S = 30.0
# Members that have lost another one come to the next epoch within milliseconds; one that is later may be lost as well.
LATE_S = 0.1


@dataclass(frozen=True)
class Epoch:
    """One world of a run.

    Attributes:
        number: Grows with each epoch.
        port: Port of the launcher's store for this epoch.
        workers: Its members by rank.
        urgent: The newest epoch that followed a loss: groups of earlier ones cannot be used any more.
        is_last: A member has completed the run, so no further group is formed.
        host: Address of the launcher that serves the store.
        node: Number of that launcher's node.
    """

    number: int
    port: int
    workers: tuple[int, ...]
    urgent: int = 0
    is_last: bool = False
    host: str = "127.0.0.1"
    node: int = 0


def write_epoch(path: Path, epoch: Epoch) -> None:
    """Replace the file at once, so that a reader sees the old or the new epoch."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(epoch)), encoding="utf-8")
    part.replace(path)


def read_epoch(path: Path) -> Epoch:
    """Read the present epoch.

    Raises:
        OSError: The launcher has ended.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    return Epoch(**{**found, "workers": tuple(found["workers"])})


class EpochEnded(RuntimeError):
    """Another epoch has replaced the one that this process was entering."""


class RunEnded(Exception):
    """Another process has completed the run, so no group is formed any more."""


class Membership:
    """One worker's view of the epochs.

    Args:
        path: The launcher's file.
        worker: This process's number.

    Attributes:
        worker: This process's number.
        present: The epoch whose group this process uses; None before the first one.
        newest: The newest epoch that was read.
        lock: Held while the group is changed or ended.
    """

    def __init__(self, path: Path, worker: int) -> None:
        self._path, self.worker = path, worker
        self.present: Epoch | None = None
        self.newest = read_epoch(path)
        self.lock = threading.Lock()
        self._is_over = threading.Event()
        self._ended = self._late = -1

    @property
    def is_member(self) -> bool:
        """Whether the newest epoch has this process."""
        return self.worker in self.newest.workers

    @property
    def has_changed(self) -> bool:
        """Whether a newer epoch than the present one is known."""
        return self.present is not None and self.newest.number > self.present.number

    def read(self) -> Epoch:
        """Read the file, and return the newest epoch; the last known one if the launcher has ended."""
        try:
            found = read_epoch(self._path)
        except (OSError, ValueError, KeyError, TypeError):
            return self.newest
        if found.number >= self.newest.number:
            self.newest = found
        return self.newest

    def wait_for_next(self, timeout_s: float = NOTICE_S) -> Epoch:
        """Wait for an epoch after the present one that has this process.

        Args:
            timeout_s: Longest wait, seconds.

        Raises:
            TimeoutError: There was none.
            RunEnded: There will be none.
        """
        end = time.monotonic() + timeout_s
        before = -1 if self.present is None else self.present.number
        while not (self.read().number > before and self.is_member):
            if self.newest.is_last:
                raise RunEnded
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.005)
        return self.newest

    def has_ended(self, epoch: Epoch) -> bool:
        """Return whether an epoch cannot be entered any more."""
        return self.read().number > epoch.number or self.newest.is_last

    def mark(self, name: str) -> None:
        """Report to the launcher how far this process is: an empty file beside its own."""
        mark_path(self._path.parent, name, self.worker).touch()

    def mark_broken(self, epoch: Epoch) -> None:
        """Report to the launcher that a member of an epoch is lost, or late after a loss."""
        with suppress(OSError):  # the launcher has ended
            self.mark(broken_mark(epoch))

    def note_wait(self, epoch: Epoch, waited_s: float) -> None:
        """Report that members of an epoch that follows a loss are late, once that is so.

        Args:
            epoch: The epoch that this process enters.
            waited_s: How long it has waited for the others.
        """
        if waited_s > LATE_S and 0 < epoch.urgent == epoch.number != self._late:
            self._late = epoch.number
            self.mark_broken(epoch)

    def watch(self, end_group: Callable[[], object]) -> None:
        """Start the watch thread.

        Args:
            end_group: Ends the present group, so that a blocked call of the main thread raises an error.
        """

        def run() -> None:
            seen = (0, 0)
            while not self._is_over.wait(WATCH_S):
                try:
                    found = os.stat(self._path)
                except OSError:
                    return
                if seen == (seen := (found.st_ino, found.st_mtime_ns)):
                    continue
                self.read()
                with self.lock:
                    if self.present is not None and self.newest.urgent > max(self.present.number, self._ended):
                        self._ended = self.newest.urgent
                        end_group()

        threading.Thread(target=run, name="membership", daemon=True).start()

    def close(self) -> None:
        """End the watch thread."""
        self._is_over.set()


def broken_mark(epoch: Epoch) -> str:
    """Return the name of the mark of a worker that has lost a connection in an epoch."""
    return f"broken-{epoch.number}"


def mark_path(folder: Path, name: str, worker: int) -> Path:
    """Return the file by which a worker reports to the launcher how far it is.

    Args:
        folder: The launcher's temporary folder.
        name: ready: its run is built, and it can enter an epoch; member: it has the run's weights; or a `broken_mark`.
        worker: The worker's number.
    """
    return folder / f"{name}-{worker}"
