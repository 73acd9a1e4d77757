"""What the launchers of several machines write for each other into the run folder, on the disk that they share.

    .crew/NONCE/node-K.json     status of node K, replaced ten times a second: its heartbeat and its processes
    .crew/NONCE/view-N.json    view N, created once by a hard link: of two launchers that try, one succeeds
    .crew/NONCE/newest.json     a copy of the newest view; readers ignore one that is older than what they have read
    .crew/NONCE/record.json     what launchers that join later have to share; their key is in a file of the same folder

The disk is the only fixed point: no file belongs to a machine that must not be lost. Files are replaced and opened
again for each read, which network file systems pass on at once (close-to-open consistency).
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from samebits.cluster.views.membership import View, read_view
from samebits.errors import LaunchError
from samebits.launch.crew.shared_files import NEWEST, MemberState, NodeStatus, has_heartbeat, read_status, remove
from samebits.launch.nodes.auth import FILE_NAME

# A machine whose connections break is lost with its launcher, unless that one writes a status within this time; or,
# where the disk or this machine is slow, within so many times the longest time between two looks of this launcher.
SILENT_S = 0.3
SILENT_LOOKS = 4
# So long after the next view has begun, too, at least: often several machines are lost one after the other.
SETTLING_S = 1.0

# A status is written when it changes, and this often per cluster.node_timeout_s, or three times in SILENT_S.
BEATS = 20


class SharedFolder:
    """One launcher's view of the files in `.crew/NONCE`. A status that stays the same for `node_timeout_s`: a loss."""

    def __init__(self, path: Path, node_timeout_s: float) -> None:
        self._path, self._node_timeout_s = path, node_timeout_s
        self._known: dict[str, NodeStatus] = {}  # by file: the last status that could be read
        self._seen: dict[int, tuple[int, float]] = {}  # by node: its last beat, and when it was first read
        self._lost: dict[int, int] = {}  # by node: the last beat of one that is lost
        self._broken_since = self._longest_look_s = 0.0
        # Monotonic clocks of one machine only: times of other machines are never compared with them.
        self._looked_at = self._written_at = time.monotonic()
        self._broken_at = -math.inf
        self._beat = 0
        #: Whether a connection of the present view is broken, or one was `SETTLING_S` ago. Launchers then write their
        #: status at each poll, and one that is silent for `SILENT_S` is lost.
        self.is_broken = False
        # Not only after a broken connection: a launcher may see that later than others.
        self.beat_s = min(node_timeout_s / BEATS, SILENT_S / 3)  #: How often its status is written, at least.
        self.node = self._claim_number()  #: This launcher's number.

    def publish(self, status: NodeStatus) -> None:
        """Replace this node's status.

        Raises:
            FileNotFoundError: The other nodes have ended the run.
            LaunchError: The disk has taken none for `node_timeout_s`.
        """
        self._beat += 1
        try:
            self._write(self._status_path(self.node).name, asdict(replace(status, beat=self._beat)))
            self._written_at = time.monotonic()
        # Not a fault of the disk: another launcher has removed the folder, as the run has ended.
        except FileNotFoundError:
            raise
        except OSError as error:
            # One failed write does no harm, as the others wait for node_timeout_s too.
            if time.monotonic() - self._written_at > self._node_timeout_s:
                raise self._failed(error) from None

    @contextmanager
    def beating(self, status: NodeStatus) -> Iterator[None]:
        """Repeat a status in a thread, during work that can take seconds, such as starting a process."""
        is_over = threading.Event()

        def beat() -> None:
            with suppress(FileNotFoundError, LaunchError):  # the next status of the main thread raises it
                while not is_over.wait(self.beat_s):
                    self.publish(status)

        thread = threading.Thread(target=beat, name="heartbeat")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            # Joined before the main thread publishes again: both would write the same .part file.
            thread.join()

    def statuses(self, view: int = -1) -> dict[int, NodeStatus]:
        """Return each node's last status, unless it is lost: after `SILENT_S` if a connection of `view` is broken."""
        found = {}
        for path in sorted(self._path.glob("node-*.json")):
            try:
                self._known[path.name] = read_status(path)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError, KeyError):  # a network disk may fail once: the node is silent
                if path.name not in self._known:
                    continue
            status = self._known[path.name]
            found[status.node] = status
        now = time.monotonic()
        # After a pause of this launcher or of the disk, how long the others were silent is not known.
        pause_s = max(0.0, now - self._looked_at - self._node_timeout_s / 4)
        self._seen = {node: (beat, since + pause_s) for node, (beat, since) in self._seen.items()}
        for node, status in found.items():
            if self._seen.get(node, (-1,))[0] != status.beat:
                self._seen[node] = status.beat, now
        was_broken = self.is_broken
        if any(0 <= view == status.broken for status in found.values()):
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

    def has_timed_out(self, node: int) -> bool:
        """Return whether a node has left, or was silent for `node_timeout_s` whatever its connections are."""
        since = self._seen.get(node, (-1, -math.inf))[1]
        return time.monotonic() - since >= self._node_timeout_s or not self._status_path(node).exists()

    def newest(self, known: View) -> View:
        """Return the newest view: the known one, or one that was published after it."""
        # The newest view is only a copy: one that cannot be read is read at the next look.
        with suppress(OSError, ValueError, TypeError):
            found = read_view(self._path / NEWEST)
            if found.number > known.number:
                return found
        return known

    def members(self, numbers: range) -> set[int]:
        """Return the processes that were members in any of these views."""
        found: set[int] = set()
        for number in numbers:
            with suppress(OSError, ValueError, KeyError, TypeError):
                found |= {*read_view(self._path / f"view-{number}.json").members}
        return found

    def begin(self, view: View) -> View | None:
        """Publish the next view, and return the one that has its number now: another launcher may have been first.

        The status of each node that is lost to this launcher goes, so that it is lost to all, and to those that join
        later. One that only seemed lost writes it again.

        Returns:
            None: The disk does not take it now. `publish` raises an error if that lasts.

        Raises:
            FileNotFoundError: The other nodes have ended the run.
            LaunchError: The disk has failed after others could read the view.
        """
        part, path = self._path / f"view.{self.node}.part", self._path / f"view-{view.number}.json"
        try:
            part.write_text(json.dumps(asdict(view)), encoding="utf-8")
        except FileNotFoundError:
            raise
        except OSError:
            return None
        try:
            with suppress(FileExistsError):
                # A link fails if the name exists, and the file behind it is complete: of two launchers, one succeeds.
                os.link(part, path)
            part.unlink()
            found = read_view(path)
            if found == view:
                self._forget_lost()
            if self.newest(found) is found:
                self._write(NEWEST, asdict(found))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed(error) from None
        return found

    def leave(self, status: NodeStatus, is_end: bool) -> None:
        """Publish this node's last status; the last node of a run that has ended removes the folder.

        Args:
            status: What the node's processes have come to.
            is_end: Whether the run has ended; otherwise this node leaves the others, and is lost to them at once. So
                is a node without a process that is done: no other node has to know of it.
        """
        done: dict[int, MemberState] = {number: "done" for number, state in status.members.items() if state == "done"}
        with suppress(OSError, LaunchError):  # the run has ended, or the disk does not answer
            # An end without a finished process has nothing to report, and no launcher waits for it (ADR 52).
            if not is_end or not (done or status.failure):
                self._status_path(self.node).unlink(missing_ok=True)
            elif self._path.is_dir():
                self.publish(replace(status, members=done, has_ended=True))
        # The others may only seem lost, as after a pause of the disk.
        if all(other.has_ended for other in self.statuses().values()) and not has_heartbeat(self._path, SETTLING_S):
            remove(self._path)
            with suppress(OSError):
                self._path.parent.rmdir()
                # The launcher that has written it may be lost.
                (self._path.parent.parent / FILE_NAME).unlink(missing_ok=True)

    def _forget_lost(self) -> None:
        for node, beat in self._lost.items():
            path = self._status_path(node)
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                # Only if it is still the beat that was judged: a node that was slow has written a newer one.
                if read_status(path).beat == beat:
                    path.unlink()

    def _status_path(self, node: int) -> Path:
        return self._path / f"node-{node}.json"

    def _failed(self, error: OSError) -> LaunchError:
        return LaunchError(
            f"cannot write to {self._path}",
            given=str(error.strerror),
            where="where the launchers of the run meet",
            fix="Make room on that disk, or see why it does not answer; then resume the run with --resume auto.",
        )

    def _claim_number(self) -> int:
        number = 0
        while True:
            try:
                # `touch` without exist_ok is O_EXCL: two launchers cannot get one number.
                (self._path / f"claim-{number}").touch(exist_ok=False)
                return number
            except FileExistsError:
                number += 1

    def _write(self, name: str, content: dict[str, object]) -> None:
        part = self._path / f"{name}.{self.node}.part"
        part.write_text(json.dumps(content), encoding="utf-8")
        # Replaced whole: a reader on another machine sees the old status or the new one.
        part.replace(self._path / name)
