"""Opens the file that processes share as their store, for `--init file:///PATH`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store

from lockstep.cluster.env import RankAssignment
from lockstep.errors import LaunchError


def open_file_store(path: Path, placement: RankAssignment) -> Store:
    """Open the store, and make its file where there is none.

    Raises:
        LaunchError: The file can't be written, or holds something else.
    """
    folder = path.parent
    if not folder.is_dir():
        raise LaunchError(f"can't meet at {placement.init}: there is no folder {folder}")
    try:
        # Opened as torch does, which would wait for ever: permissions don't say that nothing can be made in /proc.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError as error:
        raise LaunchError(f"can't meet at {placement.init}: {path} can't be written: {error.strerror}") from None
    if not is_store_file(path):
        raise LaunchError(
            f"can't meet at {placement.init}: {path} is a file that no run has made",
            fix="name a file that is not there",
        )
    store = FileStore(str(path), placement.world_size)
    # For ever: at its end it would count itself out of the file, and so make it anew after rank 0 has removed it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def is_store_file(path: Path) -> bool:
    """Whether a file is empty, or holds the keys of a torch FileStore: it is written to, and removed at the end."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(32)
    return not head or b"refcount/" in head  # the first key that torch writes
