"""What the launchers of several machines write for each other into the run folder, on the disk that they share.

    .crew/NONCE/node-K.json     status of node K, replaced ten times a second: its heartbeat and its processes
    .crew/NONCE/epoch-N.json    epoch N, created once by a hard link: of two launchers that try, one succeeds
    .crew/NONCE/newest.json     a copy of the newest epoch; readers ignore one that is older than what they have read
    .crew/NONCE/record.json     what launchers that join later have to share; their key is in a file of the same folder

The disk is the only fixed point: no file belongs to a machine that must not be lost. Files are replaced and opened
again for each read, which network file systems pass on at once (close-to-open consistency).
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from lockstep.cluster.epochs.membership import Epoch, read_epoch
from lockstep.errors import LaunchError
from lockstep.launch.nodes.auth import FILE_NAME

PARENT = ".crew"
NEWEST = "newest.json"
RECORD = "record.json"

# A machine whose connections break is lost with its launcher, unless that one writes a status within this time; or,
# where the disk or this machine is slow, within so many times the longest time between two looks of this launcher.
SILENT_S = 0.3
SILENT_LOOKS = 4
# So long after the next epoch has begun, too, at least: often several machines are lost one after the other.
SETTLING_S = 1.0

# A status is written when it changes, and this often per cluster.node_timeout_s.
BEATS = 20

WorkerState = Literal["planned", "started", "ready", "member", "done"]


@dataclass(frozen=True)
class NodeStatus:
    """What a launcher reports of its node.

    Attributes:
        node: Its number.
        beat: Grows with each write.
        workers: State of each process that is planned, runs or is done, by number. A lost one is missing.
        is_stopping: Its launcher stops the run, after a signal.
        is_leaving: Its launcher has received a signal that may be for this node alone.
        has_ended: Its launcher writes no more.
        failure: Why the run has failed, for all launchers; empty if it has not.
        broken: The present epoch, if a process of this node has lost a connection in it; else -1.
    """

    node: int
    beat: int = 0
    workers: dict[int, WorkerState] = field(default_factory=dict)
    is_stopping: bool = False
    is_leaving: bool = False
    has_ended: bool = False
    failure: str = ""
    broken: int = -1


class SharedFolder:
    """One launcher's view of the files.

    Args:
        path: The folder `.crew/NONCE`.
        node_timeout_s: A node whose status does not change for this long is lost, seconds by this machine's clock.

    Attributes:
        node: This launcher's number.
        beat_s: How often its status is written, at least.
        is_broken: Whether a connection of the present epoch is broken, or one was `SETTLING_S` ago. Launchers then
            write their status at each poll, and one that is silent for `SILENT_S` is lost.
    """

    def __init__(self, path: Path, node_timeout_s: float) -> None:
        self._path, self._node_timeout_s = path, node_timeout_s
        self._seen: dict[int, tuple[int, float]] = {}  # by node: its last beat, and when it was first read
        self._lost: dict[int, int] = {}  # by node: the last beat of one that is lost
        self._broken_since = self._looked_at = self._longest_look_s = 0.0
        self._broken_at = -math.inf
        self._beat = 0
        self.is_broken = False
        self.beat_s = node_timeout_s / BEATS
        self.node = self._claim_number()

    def publish(self, status: NodeStatus) -> None:
        """Replace this node's status."""
        self._beat += 1
        self._write(f"node-{self.node}.json", asdict(replace(status, beat=self._beat)))

    @contextmanager
    def beating(self, status: NodeStatus) -> Iterator[None]:
        """Repeat a status in a thread, during work that can take seconds, such as starting a process."""
        is_over = threading.Event()

        def beat() -> None:
            with suppress(FileNotFoundError):  # the run has ended
                while not is_over.wait(min(self.beat_s, SILENT_S / 4)):
                    self.publish(status)

        thread = threading.Thread(target=beat, name="heartbeat")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def statuses(self, epoch: int = -1) -> dict[int, NodeStatus]:
        """Return the last status of each node that is not lost, by number.

        Args:
            epoch: The present epoch, if a broken connection in it is a reason to wait for `SILENT_S` only.
        """
        found, now = {}, time.monotonic()
        for path in sorted(self._path.glob("node-*.json")):
            with suppress(OSError, ValueError, TypeError):
                content = json.loads(path.read_text(encoding="utf-8"))
                workers = {int(number): state for number, state in content["workers"].items()}
                status = NodeStatus(**{**content, "workers": workers})
                beat, since = self._seen.get(status.node, (-1, now))
                if beat != status.beat:
                    self._seen[status.node] = status.beat, now
                found[status.node] = status
        was_broken = self.is_broken
        if any(0 <= epoch == status.broken for status in found.values()):
            self._broken_at = now
            if not was_broken:
                self._broken_since, self._longest_look_s = now, 0.0
        if was_broken:
            self._longest_look_s = max(self._longest_look_s, now - self._looked_at)
        self._looked_at, silent_s = now, max(SILENT_S, SILENT_LOOKS * self._longest_look_s)
        self.is_broken = now - self._broken_at < max(SETTLING_S, 2 * silent_s)
        has_waited = self.is_broken and now - self._broken_since >= silent_s
        limit_s = min(silent_s, self._node_timeout_s) if has_waited else self._node_timeout_s
        for node, (beat, since) in self._seen.items():
            if node in found and not found[node].has_ended and (self._lost.get(node) == beat or now - since >= limit_s):
                self._lost[node] = beat
                del found[node]
        return found

    def newest(self, known: Epoch) -> Epoch:
        """Return the newest epoch: the known one, or one that was published after it."""
        with suppress(OSError, ValueError, TypeError):
            found = read_epoch(self._path / NEWEST)
            if found.number > known.number:
                return found
        return known

    def begin(self, epoch: Epoch) -> Epoch:
        """Publish an epoch, and return the one that has its number now: another launcher may have been first.

        The status of each node that is lost to this launcher goes, so that it is lost to all, and to those that join
        later. One that only seemed lost writes it again.
        """
        part, path = self._path / f"epoch.{self.node}.part", self._path / f"epoch-{epoch.number}.json"
        part.write_text(json.dumps(asdict(epoch)), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(part, path)
        part.unlink()
        found = read_epoch(path)
        if found == epoch:
            for node, beat in self._lost.items():
                if self._seen[node][0] == beat:
                    (self._path / f"node-{node}.json").unlink(missing_ok=True)
        if self.newest(found) is found:
            self._write(NEWEST, asdict(found))
        return found

    def leave(self, status: NodeStatus, is_end: bool) -> None:
        """Publish this node's last status; the last node of a run that has ended removes the folder.

        Args:
            status: What the node's processes have come to.
            is_end: Whether the run has ended; otherwise this node leaves the others, and is lost to them at once.
        """
        if not is_end:
            (self._path / f"node-{self.node}.json").unlink(missing_ok=True)
        elif self._path.is_dir():
            self.publish(replace(status, has_ended=True))
        if all(other.has_ended for other in self.statuses().values()):
            _remove(self._path)
            with suppress(OSError):
                self._path.parent.rmdir()
                # The launcher that has written it may be lost.
                (self._path.parent.parent / FILE_NAME).unlink(missing_ok=True)

    def _claim_number(self) -> int:
        number = 0
        while True:
            try:
                (self._path / f"claim-{number}").touch(exist_ok=False)
                return number
            except FileExistsError:
                number += 1

    def _write(self, name: str, content: dict[str, object]) -> None:
        part = self._path / f"{name}.{self.node}.part"
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(self._path / name)


def make_shared_folder(run_folder: Path, nonce: str) -> Path:
    """Create the folder of this run's launchers, in place of one that an earlier run has left.

    Args:
        run_folder: The run folder.
        nonce: Names this start of the run.

    Raises:
        LaunchError: Its parent is a link.
    """
    path = run_folder / PARENT / nonce
    if path.parent.is_symlink():
        raise LaunchError(
            f"{path.parent} is a link: the launchers would write, and remove files, where it points to",
            fix="Remove the link, or use another --run-dir.",
        )
    for old in path.parent.glob("*"):
        _remove(old)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700)
    return path


def has_heartbeat(path: Path, limit_s: float) -> bool:
    """Return whether a launcher writes its status into a folder now.

    Args:
        path: The folder `.crew/NONCE`.
        limit_s: How long to wait for it, seconds.
    """
    first, end = _beats(path), time.monotonic() + limit_s
    while first and time.monotonic() < end:
        time.sleep(0.02)
        if any(first.get(name) != beat for name, beat in _beats(path).items()):
            return True
    return False


def _beats(path: Path) -> dict[str, object]:
    found = {}
    for each in path.glob("node-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(each.read_text(encoding="utf-8"))
            if not content["has_ended"]:
                found[each.name] = content["beat"]
    return found


def _remove(folder: Path) -> None:
    """Remove the files that launchers write, and the folder if nothing else is in it."""
    if folder.is_symlink():  # a run folder may come from a stranger, and links lead anywhere
        return
    with suppress(OSError):
        for pattern in ("claim-*", "node-*.json", "epoch-*.json", NEWEST, RECORD, "*.part", f"{FILE_NAME}*"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        folder.rmdir()
