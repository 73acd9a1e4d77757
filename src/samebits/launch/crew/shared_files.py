"""What one launcher writes of its node, and the making and removing of the folder; `shared_folder` lists its files."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from samebits.errors import LaunchError
from samebits.launch.nodes.auth import FILE_NAME

PARENT = ".crew"
NEWEST = "newest.json"
RECORD = "record.json"

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
    broken: int = -1  #: The present view, if a process of this node has lost a connection in it; else -1.


def read_status(path: Path) -> NodeStatus:
    """Read one node's status.

    Raises:
        OSError: The file cannot be read.
        ValueError, TypeError, KeyError: It is no status.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    return NodeStatus(**{**content, "members": {int(number): state for number, state in content["members"].items()}})


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
    first, end = _beats(path), time.monotonic() + limit_s
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
            content = json.loads(each.read_text(encoding="utf-8"))
            if not content["has_ended"]:
                found[each.name] = content["beat"]
    return found


def remove(folder: Path) -> None:
    """Remove the files that launchers write, and the folder if nothing else is in it."""
    if folder.is_symlink():  # a run folder may come from a stranger, and links lead anywhere
        return
    with suppress(OSError):
        for pattern in ("claim-*", "node-*.json", "view-*.json", NEWEST, RECORD, "*.part", f"{FILE_NAME}*"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        folder.rmdir()
