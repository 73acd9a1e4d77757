"""The members of a world that may change: the launcher names them, and each of its processes reads it.

    launcher    views.json: number, port of its store, members in the order of their ranks   replaced for each view
    members     main thread: waits for the next view after a loss, or between two steps
                watch thread: reads the file 50 times a second; an urgent view ends the present group

A member is one process that the launcher has started, and its number is never used again. The file is in the launcher's
temporary folder, which only this user can read. Nothing here imports torch.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from samebits.cluster.timeout import CallThread
from samebits.plain_file import parse_json, read_plain

_MAX_BYTES = 1 << 20  # on a disk that others may write to
WATCH_S = 0.02
# How long a member that has lost a connection waits for the launcher to name the members.
NOTICE_S = 30.0
# Members that have lost another one come to the next view within milliseconds; one that is later may be lost as well.
LATE_S = 0.1


@dataclass(frozen=True)
class View:
    """One world of a run."""

    number: int  #: Grows with each view.
    port: int  #: Port of the launcher's store for this view.
    members: tuple[int, ...]  #: Their numbers, by rank.
    urgent: int = (
        0  #: The newest view that followed a loss: groups of earlier ones cannot be used any more.
    )
    is_last: bool = False  #: A member has completed the run, so no further group is formed.
    host: str = "127.0.0.1"  #: Address of the launcher that serves the store.
    node: int = 0  #: Number of that launcher's node.


def write_view(path: Path, view: View) -> None:
    """Replace the file at once, so that a reader sees the old or the new view."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(view)), encoding="utf-8")
    part.replace(path)


def read_view(path: Path) -> View:
    """Read the present view. Raises OSError if the launcher has ended."""
    found = parse_json(read_plain(path, _MAX_BYTES))
    return View(**{**found, "members": tuple(found["members"])})


class ViewEnded(RuntimeError):
    """Another view has replaced the one that this process was entering."""


class RunEnded(Exception):
    """Another process has completed the run, so no group is formed any more."""


class Membership:
    """What one member knows of the views.

    Attributes:
        member: This process's number.
        present: The view whose group this process uses; None before the first one.
        newest: The newest view that was read.
        lock: Held while the group is changed or ended.
        idle: Threads for `wait_for_peers` that make no call now.
    """

    def __init__(self, path: Path, member: int) -> None:
        self._path = path
        self.member = member
        self.present: View | None = None
        self.newest = read_view(path)
        # Held while the group changes: the watch thread must not end a group that the main thread is just replacing.
        self.lock = threading.Lock()
        self.idle: list[CallThread] = []
        self._is_over = threading.Event()
        self._ended = self._late = -1

    @property
    def is_member(self) -> bool:
        """Whether the newest view has this process."""
        return self.member in self.newest.members

    @property
    def has_changed(self) -> bool:
        """Whether a newer view than the present one is known."""
        return self.present is not None and self.newest.number > self.present.number

    def read(self) -> View:
        """Read the file, and return the newest view; the last known one if the launcher has ended."""
        try:
            found = read_view(self._path)
        except (OSError, ValueError, KeyError, TypeError):
            return self.newest
        if found.number >= self.newest.number:
            self.newest = found
        return self.newest

    def wait_for_next(self, timeout_s: float = NOTICE_S) -> View:
        """Wait for a view after the present one that has this process.

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

    def has_ended(self, view: View) -> bool:
        """Return whether a view cannot be entered any more."""
        return self.read().number > view.number or self.newest.is_last

    def mark(self, name: str) -> None:
        """Report to the launcher how far this process is: an empty file beside its own."""
        mark_path(self._path.parent, name, self.member).touch()

    def mark_broken(self, view: View) -> None:
        """Report to the launcher that a member of a view is lost, or late after a loss."""
        with suppress(OSError):  # the launcher has ended
            self.mark(broken_mark(view))

    def note_wait(self, view: View, waited_s: float) -> None:
        """Report that members of a view that follows a loss are late, once that is so."""
        if waited_s > LATE_S and 0 < view.urgent == view.number != self._late:
            self._late = view.number
            self.mark_broken(view)

    def watch(self, end_group: Callable[[], object]) -> None:
        """Start the watch thread; `end_group` ends the present group, so that a call that blocks raises an error."""

        def run() -> None:
            seen = (0, 0)
            while not self._is_over.wait(WATCH_S):
                try:
                    found = os.stat(self._path)
                except OSError:
                    return
                # A replaced file has another inode, also within one tick of the file system's clock.
                if seen == (seen := (found.st_ino, found.st_mtime_ns)):
                    continue
                self.read()
                with self.lock:
                    if self.present is not None and self.newest.urgent > max(
                        self.present.number, self._ended
                    ):
                        self._ended = self.newest.urgent
                        end_group()

        threading.Thread(target=run, name="membership", daemon=True).start()

    def close(self) -> None:
        """End the threads."""
        self._is_over.set()
        for thread in self.idle:
            thread.calls.put(None)


def broken_mark(view: View) -> str:
    """Return the name of the mark of a member that has lost a connection in a view."""
    return f"broken-{view.number}"


def mark_path(folder: Path, name: str, member: int) -> Path:
    """Return the file by which a process reports to the launcher how far it is.

    Args:
        name: ready: its run is built, and it can enter a view; member: it has the run's weights; or a `broken_mark`.
    """
    return folder / f"{name}-{member}"
