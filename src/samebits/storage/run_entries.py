"""Refuse a run folder in which a write would leave the folder or block forever.

A run folder may come from another user. In it, `logs` can be a link to a folder of this user, a log file a link to any
file, and `metrics.part` a FIFO, on which a write waits for a reader.
"""

import os
import stat
from pathlib import Path

from samebits.errors import CheckpointError

FOLDERS = ("checkpoints", "logs", "pictures", "tensorboard", "trackers")
_DO = "Give another --run-dir, or replace it with a regular file or folder."


def check_entries(run: Path) -> None:
    """Check that a run's folders are folders and its files are files, none of them a symbolic link.

    Links to folders under names that no run writes to are allowed, and so are checkpoints that are links: a run only
    reads those, or removes the link.

    Raises:
        CheckpointError: An entry is a link, a FIFO or a device, or a file has the name of a folder.
        OSError: A folder cannot be read.
    """
    folders = [run]
    for folder in (run / name for name in FOLDERS):
        try:
            mode = folder.lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            raise _through_link(folder)
        if not stat.S_ISDIR(mode):
            raise CheckpointError(f"{folder} is not a folder, and a run would write files into it", fix=_DO)
        folders.append(folder)
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                if os.path.isdir(entry.path):  # follows links; unlike entry.is_dir, no error for a link to itself
                    continue
                if entry.is_symlink():
                    raise _through_link(Path(entry.path))
                if not entry.is_file() and os.path.lexists(entry.path):  # a running process may have removed it
                    raise CheckpointError(
                        f"{entry.path} is neither a file nor a folder, and a run might write to it", fix=_DO
                    )


def _through_link(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is a symbolic link, and a run would write through it", fix=_DO)
