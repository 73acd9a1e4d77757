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
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from samebits.cluster.env import run_key
from samebits.cluster.signed import SignedStore
from samebits.cluster.views.membership import View, read_view
from samebits.errors import LaunchError
from samebits.launch.nodes import auth
from samebits.launch.nodes.auth import FILE_NAME
from samebits.launch.nodes.rendezvous import compare, describe_run, read_record
from samebits.plain_file import parse_json, read_plain
from samebits.process_range import RendezvousConfig

# What one launcher writes of its node, and the making and removing of the folder; `shared_folder` lists its files.


PARENT = ".crew"
NEWEST = "newest.json"
RECORD = "record.json"
_MAX_BYTES = 1 << 20  # the run folder may be a stranger's

MemberState = Literal["planned", "started", "ready", "member", "done"]


@dataclass(frozen=True)
class NodeStatus:
    """What a launcher reports of its node."""

    node: int  #: Its number.
    beat: int = 0  #: Grows with each write.
    #: State of each process that is planned, runs or is done, by number. A lost one is missing.
    members: dict[int, MemberState] = field(default_factory=dict)
    is_stopping: bool = False  #: Its launcher stops the run, after a signal.
    is_leaving: bool = False  #: Its launcher has received a signal that may be for this node alone.
    has_ended: bool = False  #: Its launcher writes no more.
    failure: str = ""  #: Why the run has failed, for all launchers; empty if it has not.
    #: The present view, if a process of this node has lost a connection in it; else -1.
    broken: int = -1


def read_status(path: Path) -> NodeStatus:
    """Read one node's status.

    Raises:
        OSError: The file cannot be read.
        ValueError, TypeError, KeyError: It is no status.
    """
    content = parse_json(read_plain(path, _MAX_BYTES))
    return NodeStatus(
        **{
            **content,
            "members": {int(number): state for number, state in content["members"].items()},
        }
    )


def make_shared_folder(run_folder: Path, nonce: str) -> Path:
    """Create the folder of this run's launchers, in place of one that an earlier run has left.

    Raises:
        LaunchError: Its parent is a link.
    """
    path = run_folder / PARENT / nonce
    if path.parent.is_symlink():
        raise LaunchError(
            f"{path.parent} is a link: the launchers would write, and remove files, where it points to",
            fix="Remove the link, or use another --run-dir.",
        )
    # Left by a run that was killed: `join_group` has found no launcher with a heartbeat here.
    for old in path.parent.glob("*"):
        remove(old)
    # 0700, since the folder has the key of the launchers.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700)
    return path


def has_heartbeat(path: Path, limit_s: float) -> bool:
    """Return whether a launcher writes its status into a folder `.crew/NONCE` within `limit_s`, in seconds."""
    first = _beats(path)
    end = time.monotonic() + limit_s
    while first and time.monotonic() < end:
        time.sleep(0.02)
        # Beats count up, so any change is a sign of life, whatever the clocks of the machines are.
        if any(first.get(name) != beat for name, beat in _beats(path).items()):
            return True
    return False


def _beats(path: Path) -> dict[str, object]:
    found = {}
    for each in path.glob("node-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = parse_json(read_plain(each, _MAX_BYTES))
            if not content["has_ended"]:
                found[each.name] = content["beat"]
    return found


def remove(folder: Path) -> None:
    """Remove the files that launchers write, and the folder if nothing else is in it."""
    if folder.is_symlink():  # a run folder may come from a stranger, and links lead anywhere
        return
    with suppress(OSError):
        for pattern in (
            "claim-*",
            "node-*.json",
            "view-*.json",
            NEWEST,
            RECORD,
            "*.part",
            f"{FILE_NAME}*",
        ):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        folder.rmdir()


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
        self._path = path
        self._node_timeout_s = node_timeout_s
        self._known: dict[str, NodeStatus] = {}  # by file: the last status that could be read
        # by node: its last beat, and when it was first read
        self._seen: dict[int, tuple[int, float]] = {}
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
        #: How often its status is written, at least.
        self.beat_s = min(node_timeout_s / BEATS, SILENT_S / 3)
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
            with suppress(
                FileNotFoundError, LaunchError
            ):  # the next status of the main thread raises it
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
            except (
                OSError,
                ValueError,
                TypeError,
                KeyError,
            ):  # a network disk may fail once: the node is silent
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
                self._broken_since = now
                self._longest_look_s = 0.0
        if was_broken:
            self._longest_look_s = max(self._longest_look_s, now - self._looked_at)
        self._looked_at, silent_s = now, max(SILENT_S, SILENT_LOOKS * self._longest_look_s)
        self.is_broken = now - self._broken_at < max(SETTLING_S, 2 * silent_s)
        has_waited = self.is_broken and now - self._broken_since >= silent_s
        limit_s = min(silent_s, self._node_timeout_s) if has_waited else self._node_timeout_s
        for node, (beat, since) in self._seen.items():
            if (
                node in found
                and not found[node].has_ended
                and (self._lost.get(node) == beat or now - since >= limit_s)
            ):
                self._lost[node] = beat
                del found[node]
        return found

    def has_timed_out(self, node: int) -> bool:
        """Return whether a node has left, or was silent for `node_timeout_s` whatever its connections are."""
        since = self._seen.get(node, (-1, -math.inf))[1]
        return (
            time.monotonic() - since >= self._node_timeout_s or not self._status_path(node).exists()
        )

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
        part = self._path / f"view.{self.node}.part"
        path = self._path / f"view-{view.number}.json"
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
        done: dict[int, MemberState] = {
            number: "done" for number, state in status.members.items() if state == "done"
        }
        with suppress(OSError, LaunchError):  # the run has ended, or the disk does not answer
            # An end without a finished process has nothing to report, and no launcher waits for it (ADR 52).
            if not is_end or not (done or status.failure):
                self._status_path(self.node).unlink(missing_ok=True)
            elif self._path.is_dir():
                self.publish(replace(status, members=done, has_ended=True))
        # The others may only seem lost, as after a pause of the disk.
        if all(other.has_ended for other in self.statuses().values()) and not has_heartbeat(
            self._path, SETTLING_S
        ):
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


# Join the launchers of a run in progress, through the run folder: no machine has to serve the rendezvous any more.
#
# The launcher that creates the shared folder leaves two files for those that come later, or come back:
#
#     .crew/NONCE/.rendezvous-key   the key of the launchers, readable only for its user; none where SAMEBITS_KEY is set
#     .crew/NONCE/record.json       the record of the run, which `admission.compare` compares


MAX_RECORD_BYTES = 1024 * 1024
# How long another machine's folder may take to appear on a network disk, seconds.
VISIBLE_S = 5.0
SHARE = "crew"  # key of the launchers' store with the name of the shared folder


def describe_group(path: Path, nodes: RendezvousConfig, key: str) -> None:
    """Write what later launchers need into `.crew/NONCE`. Only the launcher that has created that folder calls this.

    Raises:
        CheckpointError: The key cannot be written.
    """
    if not run_key(os.environ):
        auth.KeyFile(path, key)
    # Written whole under another name first, as other launchers poll for the record.
    part = path / f"{RECORD}.part"
    part.write_text(json.dumps(describe_run(nodes)), encoding="utf-8")
    part.replace(path / RECORD)


def open_shared_folder(
    store: SignedStore, nodes: RendezvousConfig, key: str, nonce: str | None
) -> SharedFolder:
    """Open the files of all launchers, which the first one creates under a new name, its `nonce`.

    Raises:
        LaunchError: The run folder is not on a disk that the machines share.
    """
    if nonce is not None:
        path = make_shared_folder(nodes.folder, nonce)
        describe_group(path, nodes, key)
        # before others can read the name: it is node 0
        shared = SharedFolder(path, nodes.node_timeout_s)
        store.put(SHARE, path.name)
        return shared
    path = nodes.folder / PARENT / str(store.wait_for(SHARE))
    end = time.monotonic() + VISIBLE_S
    while not path.is_dir() and time.monotonic() < end:
        time.sleep(0.1)
        with suppress(OSError):
            # an NFS client remembers what was not there, until it reads the folder again
            os.listdir(nodes.folder)
    if not path.is_dir():
        raise LaunchError(
            "cluster.recovery=in_step with --nodes needs a run folder on a disk that all machines share",
            given=f"{nodes.folder} is not the folder that the first machine uses",
            fix="Set --run-dir to a shared disk, or cluster.recovery=restart.",
        )
    return SharedFolder(path, nodes.node_timeout_s)


def join_group(nodes: RendezvousConfig) -> tuple[SharedFolder, str] | None:
    """Join the launchers that train in this run folder now; return their shared folder and key, or None without any.

    Raises:
        LaunchError: They have other settings, or this launcher does not have their key.
    """
    parent = nodes.folder / PARENT
    # A link could lead to a folder in which a stranger's record admits this launcher.
    if parent.is_symlink() or not parent.is_dir():
        return None
    for path in sorted(parent.iterdir()):
        # A status is written many times in node_timeout_s. Files of a run that was killed cost this wait.
        if not _is_own(path) or not has_heartbeat(path, nodes.node_timeout_s / 4):
            continue
        with suppress(FileNotFoundError):  # the run has just ended
            key = _check(path, nodes)
            return SharedFolder(path, nodes.node_timeout_s), key
    return None


def _is_own(path: Path) -> bool:
    # lstat and the owner: the key in a folder of another user would be known to that user.
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return False


def _check(path: Path, nodes: RendezvousConfig) -> str:
    """Compare the record of the group, and return its key."""
    try:
        theirs = read_record(read_plain(path / RECORD, MAX_RECORD_BYTES))
    except FileNotFoundError:
        raise
    except OSError:
        theirs = None
    differing = (
        compare(theirs, describe_run(nodes), nodes.has_own_id)
        if theirs is not None
        else ["damaged"]
    )
    if theirs is None or differing:
        raise LaunchError(
            f"another run trains in {nodes.folder}",
            given="\n".join(differing),
            where=f"started by {theirs['user']} on {theirs['host']}, pid {theirs['pid']}"
            if theirs
            else str(path),
            fix="To join it, use the same command as on its other machines. Otherwise set another --run-dir.",
        )
    key = run_key(os.environ) or auth.read_key(path)
    if not key:
        raise LaunchError(
            f"this machine does not have the key of the run in {nodes.folder}",
            fix="Export the SAMEBITS_KEY of the other machines.",
        )
    return key
