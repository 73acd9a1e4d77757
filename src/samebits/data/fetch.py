"""Download small dataset files: verified by checksum, and renamed to their final name when complete."""

import hashlib
import logging
import os
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from samebits.errors import DataError
from samebits.scratch import locked, partial_path, sweep_partials

LOGGER = logging.getLogger("samebits")
_MAX_BYTES = 1 << 28  # of a file; MNIST's largest has 10 MB


def fetch(
    urls: Sequence[str], path: Path, md5: str, *, otherwise: str, timeout_s: float = 20.0
) -> None:
    """Download a file unless it exists.

    Of several processes on one machine, one downloads and the others wait for it.

    Args:
        urls: Tried in order, until one returns a file with the checksum.
        path: Path of the downloaded file.
        md5: MD5 checksum, 32 hex digits. It detects damage, not forgery.
        otherwise: An imperative sentence for errors: how the user can supply the file without a network.

    Raises:
        DataError: No URL returned the right file, or the folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock")):
            # Looked for under the lock: another process may have finished the download meanwhile.
            if not path.exists():
                sweep_partials(path.parent, path.name)
                _keep(_first_right(urls, path, md5, otherwise, timeout_s), path)
    except OSError as error:
        raise DataError(
            f"{path} can't be written: {error.strerror or error}",
            fix=f"Make the folder {path.parent} writable. {otherwise}",
        ) from error


def _first_right(
    urls: Sequence[str], path: Path, md5: str, otherwise: str, timeout_s: float
) -> bytes:
    faults = []
    for url in urls:
        LOGGER.warning("downloading %s", url)
        try:
            with urlopen(url, timeout=timeout_s) as response:
                content: bytes = response.read(_MAX_BYTES)
        except (OSError, HTTPException, ValueError) as error:
            # URLError's own text would be "<urlopen error ...>".
            cause = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
            faults.append(f"{url}: {str(cause) or type(error).__name__}")
            continue
        # Without this argument, Python builds for FIPS refuse MD5. It finds damage here, no attack.
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found == md5:
            return content
        faults.append(f"{url}: wrong file: MD5 {found}, expected {md5}")
    raise DataError(
        f"{path} is missing and can't be downloaded", cause="\n".join(faults), fix=otherwise
    )


def _keep(content: bytes, path: Path) -> None:
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            # Before the rename: a file under its final name is never verified again, so a crash must not leave a
            # damaged one.
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
