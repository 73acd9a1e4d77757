"""Names of files in lists that others wrote: they may not lead out of the folder that the user gave."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import DataError


def first_outside(names: Iterable[str], folder: Path, root: Path) -> str | None:
    """The first of some names that leads out of a folder; None where none does.

    Names are compared as text: a symbolic link below the folder may lead anywhere, since it is the user's.

    Args:
        names: Relative to `folder`, or absolute.
        folder: Where files are looked for.
        root: The folder that they have to be in.
    """
    # Joined once and not for each name: a list may have millions.
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
    """The error for such a name."""
    return DataError(
        f"{name} is not in the folder {root}",
        where=where,
        allowed="names that are relative, and do not lead out of that folder",
        fix=fix,
    )
