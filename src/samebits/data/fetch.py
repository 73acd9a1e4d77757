"""Download small dataset files: verified by checksum, and renamed to their final name when complete."""

import hashlib
import logging
import os
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from samebits.errors import DataError
from samebits.scratch import locked, partial_path, sweep_partials

LOGGER = logging.getLogger("samebits")
_MAX_BYTES = 1 << 28  # of a file; MNIST's largest has 10 MB


@dataclass(frozen=True)
class Download:
    """A file to download."""

    urls: tuple[str, ...]  #: URLs, tried in order until one returns a file with the checksum.
    path: Path  #: Path of the downloaded file.
    md5: str  #: MD5 checksum, 32 hex digits. It detects damage, not forgery.


def fetch(download: Download, *, otherwise: str, timeout_s: float = 20.0) -> None:
    """Download a file unless it exists.

    Of several processes on one machine, one downloads and the others wait for it.

    Args:
        otherwise: An imperative sentence for errors: how the user can supply the file without a network.

    Raises:
        DataError: No URL returned the right file, or the folder cannot be written to.
    """
    try:
        download.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(download.path.with_name(f".{download.path.name}.lock")):
            # Looked for under the lock: another process may have finished the download meanwhile.
            if not download.path.exists():
                sweep_partials(download.path.parent, download.path.name)
                _fetch_from_any(download, otherwise, timeout_s)
    except OSError as error:
        raise DataError(
            f"{download.path} can't be written: {error.strerror or error}",
            fix=f"Make the folder {download.path.parent} writable. {otherwise}",
        ) from error


def _fetch_from_any(download: Download, otherwise: str, timeout_s: float) -> None:
    faults = []
    for url in download.urls:
        LOGGER.warning("downloading %s", url)
        try:
            with urlopen(url, timeout=timeout_s) as response:
                content = response.read(_MAX_BYTES)
        except (OSError, HTTPException, ValueError) as error:
            # URLError's own text would be "<urlopen error ...>".
            cause = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
            faults.append(f"{url}: {str(cause) or type(error).__name__}")
            continue
        # Without this argument, Python builds for FIPS refuse MD5. It finds damage here, no attack.
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found == download.md5:
            _keep(content, download.path)
            return
        faults.append(f"{url}: wrong file: MD5 {found}, expected {download.md5}")
    raise DataError(
        f"{download.path} is missing and can't be downloaded",
        cause="\n".join(faults),
        fix=otherwise,
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
