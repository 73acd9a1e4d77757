"""Join the launchers of a run in progress, through the run folder: no machine has to serve the rendezvous any more.

The launcher that creates the shared folder leaves two files for those that come later, or come back:

    .crew/NONCE/.rendezvous-key   the key of the launchers, readable only for its user; none where SAMEBITS_KEY is set
    .crew/NONCE/record.json       the record of the run, which `admission.compare` compares
"""

import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from samebits.cluster.env import run_key
from samebits.cluster.signed import SignedStore
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError
from samebits.launch.crew.shared_files import PARENT, RECORD, has_heartbeat, make_shared_folder
from samebits.launch.crew.shared_folder import SharedFolder
from samebits.launch.nodes import auth
from samebits.launch.nodes.admission import compare, describe_run, read_record

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


def open_shared_folder(store: SignedStore, nodes: RendezvousConfig, key: str, nonce: str | None) -> SharedFolder:
    """Open the files of all launchers, which the first one creates under a new name, its `nonce`.

    Raises:
        LaunchError: The run folder is not on a disk that the machines share.
    """
    if nonce is not None:
        path = make_shared_folder(nodes.folder, nonce)
        describe_group(path, nodes, key)
        shared = SharedFolder(path, nodes.node_timeout_s)  # before others can read the name: it is node 0
        store.put(SHARE, path.name)
        return shared
    path = nodes.folder / PARENT / str(store.wait_for(SHARE))
    end = time.monotonic() + VISIBLE_S
    while not path.is_dir() and time.monotonic() < end:
        time.sleep(0.1)
        with suppress(OSError):
            os.listdir(nodes.folder)  # an NFS client remembers what was not there, until it reads the folder again
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
    with (path / RECORD).open(encoding="utf-8") as file:
        # Bounded: the file is on a disk that others may write to.
        theirs = read_record(file.read(MAX_RECORD_BYTES))
    differing = compare(theirs, describe_run(nodes), nodes.has_own_id) if theirs is not None else ["damaged"]
    if theirs is None or differing:
        raise LaunchError(
            f"another run trains in {nodes.folder}",
            given="\n".join(differing),
            where=f"started by {theirs['user']} on {theirs['host']}, pid {theirs['pid']}" if theirs else str(path),
            fix="To join it, use the same command as on its other machines. Otherwise set another --run-dir.",
        )
    key = run_key(os.environ) or auth.read_key(path)
    if not key:
        raise LaunchError(
            f"this machine does not have the key of the run in {nodes.folder}",
            fix="Export the SAMEBITS_KEY of the other machines.",
        )
    return key
