"""Share one secret key among the launchers of several machines, so that no other program can take part in their run.

The key is SAMEBITS_KEY where it is set (`samebits train --hosts` sends one through ssh's standard input). Otherwise
the launcher that serves the rendezvous writes a new key into the run folder, readable only for its user, and the
others read it there. The server then writes a signed greeting into the store. A launcher that cannot verify the
greeting has another key, or has reached another run.
"""

import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store

from samebits.cluster.env import KEY, SHORTEST_KEY, run_key
from samebits.cluster.signed import ForgedError, Seal, peek
from samebits.errors import LaunchError, cannot_make
from samebits.plain_file import open_plain
from samebits.process_range import RendezvousConfig

FILE_NAME = ".rendezvous-key"
# How long the server may take to write the greeting, and a network disk to show the key file.
GREETING_S = 5.0
_GREETING = "greeting"


def new_key() -> str:
    """Return a random key of 256 bits."""
    return secrets.token_hex(32)


def nodes_seal(key: str, nodes: RendezvousConfig) -> Seal:
    """Return the seal with which the launchers of a run sign messages."""
    return Seal(key, f"nodes {nodes.run_id}")


class KeyFile:
    """A key, by default a new one, in a folder for the other launchers of the run; `remove` deletes it.

    Raises:
        CheckpointError: It cannot be written.
    """

    def __init__(self, folder: Path, key: str = "") -> None:
        self.path = folder / FILE_NAME
        self.key = key or new_key()
        partial = folder / f"{FILE_NAME}.{os.getpid()}.partial"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Left by a killed process that had the same id. O_EXCL then also refuses a link in its place.
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(self.key)
                file.flush()
                # On disk before the rename, so that no launcher reads an empty key.
                os.fsync(descriptor)
            partial.replace(self.path)
        except OSError as error:
            raise cannot_make(folder, error) from None

    def remove(self) -> None:
        """Remove the file, unless another launcher has replaced it."""
        with suppress(OSError, LaunchError):
            if read_key(self.path.parent) == self.key:
                self.path.unlink()


def read_key(folder: Path) -> str | None:
    """Read the key from a run folder; None if there is none. Raises LaunchError if other users can read it."""
    path = folder / FILE_NAME
    try:
        # the folder may be another user's, with a link or a FIFO in it
        opened = open_plain(path, os.O_NOFOLLOW)
    except OSError:
        return None
    with opened as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise LaunchError(
                f"other users have access to {path}, the key of the run",
                given=f"permissions {mode:o}",
                fix=f"Run chmod 600 {path}; or set the same {KEY} on all machines, if the disk has no permissions.",
            )
        key = file.read(1024).decode(errors="replace").strip()
    return key if len(key) >= SHORTEST_KEY else None


def exchange_key(store: Store, nodes: RendezvousConfig) -> tuple[str, KeyFile | None]:
    """Choose the key and write the greeting, on the launcher that serves; return the key, and its file if any."""
    if key := run_key(os.environ):
        file = None
    else:
        file = KeyFile(nodes.folder)
        key = file.key
    store.set(_GREETING, nodes_seal(key, nodes).write(_GREETING, {"host": socket.gethostname()}))
    return key, file


def find_key(store: Store, nodes: RendezvousConfig) -> str:
    """Return the key that the greeting was signed with. All launchers but the serving one call this.

    Raises:
        LaunchError: This machine does not have the key, or no launcher serves the store.
    """
    given = run_key(os.environ)
    end = time.monotonic() + GREETING_S
    key = None
    problem = "the store contains no greeting of a launcher of this run"
    while time.monotonic() < end:
        if (greeting := peek(store, _GREETING)) is not None:
            # Read at each look, as a network disk may show the file late.
            key = given or read_key(nodes.folder)
            if key is None:
                problem = f"{nodes.folder / FILE_NAME} is not on this machine"
            else:
                try:
                    nodes_seal(key, nodes).read(_GREETING, greeting)
                    return key
                except ForgedError as error:
                    problem = f"the greeting was refused: {error}"
        time.sleep(0.05)
    raise LaunchError(
        f"node {socket.gethostname()} cannot prove that it belongs to the run at {nodes.endpoint}",
        where=problem,
        cause="the run folder is not on a disk that the machines share, the working folders differ, or another run "
        "uses that address",
        fix=f"On all machines, export {KEY} with the same output of: openssl rand -hex 32\n"
        "Or start all from one machine (samebits train --hosts A,B), or choose another port.",
    )
