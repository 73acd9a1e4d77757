"""Opens the file that processes share as their store, for `--init file:///PATH`."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store

from lockstep.cluster.env import RankAssignment
from lockstep.errors import LaunchError

_LENGTH = struct.Struct("@I")
# What a file begins with: the first key that torch writes. And what all keys begin with, `-` in one that was deleted.
_HEAD = _LENGTH.pack(len(b"refcount/")) + b"refcount/"
OUR_KEYS = (b"refcount/", b"/lockstep/", b"-/lockstep/")
# A rendezvous takes some kilobytes for each rank; heartbeats of a day some megabytes.
LARGEST = 256 << 20
# How long another process may take to write one value.
SETTLE_S = 2.0


def open_file_store(path: Path, assignment: RankAssignment) -> Store:
    """Open the store, and make its file where there is none.

    Raises:
        LaunchError: The file can't be written, or holds something else.
    """
    folder = path.parent
    if not folder.is_dir():
        raise LaunchError(f"can't meet at {assignment.init}: there is no folder {folder}")
    try:
        # Opened as torch does, which would wait for ever: permissions don't say that nothing can be made in /proc.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError as error:
        raise LaunchError(f"can't meet at {assignment.init}: {path} can't be written: {error.strerror}") from None
    if not is_store_file(path):
        raise LaunchError(
            f"can't meet at {assignment.init}: {path} is a file that no run has made",
            fix="name a file that is not there",
        )
    store = FileStore(str(path), assignment.world_size)
    # For ever: at its end it would count itself out of the file, and so make it anew after rank 0 has removed it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def is_store_file(path: Path) -> bool:
    """Whether a file is empty, or a FileStore of torch's with keys of Lockstep's: it is written to, and removed later.

    torch reads a damaged file for ever, so all of it is looked at. Other processes may be writing to it meanwhile.
    """
    if not path.is_file():
        return False
    end = time.monotonic() + SETTLE_S
    while True:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        keys = _keys(content) if len(content) <= LARGEST else None
        if keys is not None:
            return all(key.startswith(OUR_KEYS) for key in keys)
        if not content.startswith(_HEAD) or time.monotonic() > end:
            return False
        time.sleep(0.02)


def _keys(content: bytes) -> list[bytes] | None:
    """The keys in a FileStore's file, each text behind its length; None where the file is cut or damaged."""
    texts, at = [], 0
    while at < len(content):
        start = at + _LENGTH.size
        if start > len(content):
            return None
        at = start + int(_LENGTH.unpack_from(content, at)[0])
        if at > len(content):
            return None
        texts.append(content[start:at])
    return texts[::2] if len(texts) % 2 == 0 else None
