"""Write a page, and never over a file that this command did not write."""

from __future__ import annotations

from pathlib import Path

from samebits.errors import CheckpointError, cannot_write_result
from samebits.run_views.files import read_part
from samebits.run_views.page.build import GENERATOR
from samebits.storage.run_folder import check_target, write_atomically

_HEAD_BYTES = 2048


def check_page(path: Path) -> None:
    """Check that a page can be written, before the work.

    Raises:
        CheckpointError: It cannot, or another file has this name.
    """
    check_target(path, is_page)


def is_page(path: Path) -> bool:
    """Return whether a file is a page that Samebits wrote."""
    head = read_part(path, _HEAD_BYTES, is_end=False)
    return not path.is_symlink() and head.startswith(b"<!doctype html>") and f'content="{GENERATOR} '.encode() in head


def write_page(page: str, path: Path) -> None:
    """Write a page, whole or not at all.

    Raises:
        CheckpointError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode())
    except OSError as error:
        raise cannot_write_result(path, error) from None
    except CheckpointError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise cannot_write_result(path, error.__context__) from None
