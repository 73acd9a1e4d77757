"""Refuses a run folder in which something that a run writes would end up elsewhere, or would never end.

A run folder may come from another person. In it, `logs` may be a link to a folder of the user's, a log file a link to
any file, and `metrics.part` a FIFO, on which a write waits for a reader.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lockstep.errors import CheckpointError

FOLDERS = ("checkpoints", "logs", "pictures", "tensorboard")
_DO = "give another --run-dir, or put a file or folder of its own there"


def check_entries(run: Path) -> None:
    """See that a run's folders are folders and its files are files, none of them a symbolic link.

    Links to folders under names that no run writes to are let through, and so are checkpoints that are links: a run
    only reads those, or removes the link.

    Raises:
        CheckpointError: One is a link, a FIFO or a device, or a file is in a folder's place.
        OSError: A folder can't be read.
    """
    places = [run]
    for place in (run / name for name in FOLDERS):
        mode = _mode(place)
        if mode is None:
            continue
        if stat.S_ISLNK(mode):
            raise _through_link(place)
        if not stat.S_ISDIR(mode):
            raise CheckpointError(f"{place} is not a folder, and a run would write files into it", fix=_DO)
        places.append(place)
    for place in places:
        with os.scandir(place) as entries:
            for entry in entries:
                _check_entry(entry)


def _check_entry(entry: os.DirEntry[str]) -> None:
    if os.path.isdir(entry.path):  # also a link to one; unlike entry.is_dir, no error for a link to itself
        return
    if entry.is_symlink():
        raise _through_link(Path(entry.path))
    if not entry.is_file() and os.path.lexists(entry.path):  # a running process may have removed it in the meantime
        raise CheckpointError(f"{entry.path} is neither a file nor a folder, and a run might write to it", fix=_DO)


def _mode(place: Path) -> int | None:
    try:
        return place.lstat().st_mode
    except FileNotFoundError:
        return None


def _through_link(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is a symbolic link, and a run would write through it", fix=_DO)
