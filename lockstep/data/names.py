"""File names in untrusted lists: they must not lead out of the folder that the user gave."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import DataError


def first_outside(names: Iterable[str], folder: Path, root: Path) -> str | None:
    """Return the first name that leads out of a folder; None if all are inside.

    Names are compared as text: a symbolic link below the folder may lead anywhere, since the user made it.

    Args:
        names: File names, relative to `folder` or absolute.
        folder: Folder that relative names refer to.
        root: Folder that all files must be in.
    """
    # Resolved once, not for each name: a list may have millions.
    base = os.path.abspath(root.expanduser())
    inside = base if base.endswith(os.sep) else base + os.sep
    start = os.path.abspath(folder.expanduser())
    for name in names:
        if (".." in name or name.startswith(os.sep)) and not os.path.normpath(os.path.join(start, name)).startswith(
            inside
        ):
            return name
    return None


def outside(name: str, root: Path, *, where: str | None, fix: str) -> DataError:
    """Make the error for a name that leads out of a folder.

    Args:
        name: The name.
        root: The folder that it must be in.
        where: File and line of the name.
        fix: What the user can do, an imperative sentence.
    """
    return DataError(
        f"{name} is not in the folder {root}",
        where=where,
        allowed="names relative to that folder, without .. out of it",
        fix=fix,
    )
