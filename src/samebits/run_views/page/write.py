"""Write a page, and never over a file that this command did not write."""

import hashlib
from pathlib import Path

from samebits.config.plain_file import read_plain
from samebits.errors import CheckpointError, cannot_write_result
from samebits.storage.run_folder import check_target, write_atomically

_MARK = b"<!-- samebits page, sha256 "


def check_page(path: Path) -> None:
    """Check that a page can be written, before the work.

    Raises:
        CheckpointError: It cannot, or another file has this name.
    """
    check_target(path, is_page)


def is_page(path: Path) -> bool:
    """Return whether a file is a page that Samebits wrote and the user has not edited: it ends with its SHA-256."""
    try:
        if path.is_symlink():
            return False
        content, _, last = read_plain(path).rpartition(_MARK)
    except OSError:
        return False
    return last == _end_of(content).removeprefix(_MARK)


def _end_of(content: bytes) -> bytes:
    return _MARK + hashlib.sha256(content).hexdigest().encode() + b" -->\n"


def write_page(page: str, path: Path) -> None:
    """Write a page, whole or not at all. Raises CheckpointError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = page.encode()
        write_atomically(path, content + _end_of(content))
    except (OSError, CheckpointError) as error:
        reason = error.__context__ if isinstance(error, CheckpointError) else error
        if not isinstance(reason, OSError):
            raise
        raise cannot_write_result(path, reason) from None
