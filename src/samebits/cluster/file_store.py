"""Open the file that ranks share as their store, for `--init file:///PATH`."""

import ctypes
import os
import struct
import time
from pathlib import Path

from torch.distributed import FileStore, Store

from samebits.cluster.env import RankAssignment
from samebits.errors import LaunchError

_LENGTH = struct.Struct("@I")
# First bytes of a store file: the first key that torch writes. All keys start with one of OUR_KEYS; torch puts `-`
# before a deleted key.
_HEAD = _LENGTH.pack(len(b"refcount/")) + b"refcount/"
OUR_KEYS = (b"refcount/", b"/samebits/", b"-/samebits/")
# A rendezvous writes some kilobytes for each rank, the heartbeats of a day some megabytes.
LARGEST = 256 << 20
# How long another process may take to finish writing one value.
SETTLE_S = 2.0


def open_file_store(path: Path, assignment: RankAssignment) -> Store:
    """Open the store, and create its file if there is none.

    Raises:
        LaunchError: The file cannot be written, or has other content.
    """
    folder = path.parent
    if not folder.is_dir():
        raise LaunchError(
            f"can't use {assignment.init} as the store: there is no folder {folder}",
            fix=f"Create it on a disk that all machines share: mkdir -p {folder}",
        )
    try:
        # Opened as torch would, which retries forever. Permissions alone don't show that /proc accepts no files.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError as error:
        raise LaunchError(
            f"can't use {assignment.init} as the store: {path} can't be written: {error.strerror}",
            fix="Choose a file in a writable folder that all machines share.",
        ) from None
    if not is_store_file(path):
        raise LaunchError(
            f"can't use {assignment.init} as the store: {path} was not created by a run",
            cause="A process that is killed while it writes to the file leaves such a one, too.",
            fix="Choose a path where no file exists.",
        )
    store = FileStore(str(path), assignment.world_size)
    # Never destroyed: the destructor decrements a count in the file, and would create it again after rank 0 has
    # removed it.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def is_store_file(path: Path) -> bool:
    """Return whether a file is empty, or a FileStore of torch with Samebits's keys.

    Only such a file is written to, and removed later. torch reads a damaged file forever, so the whole content is
    checked. Other processes may write to it meanwhile.
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
    """Return the keys of a FileStore's file, which is a sequence of length-prefixed texts; None if it is damaged."""
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
