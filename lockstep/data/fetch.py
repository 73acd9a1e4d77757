"""Fetch a file from the network: checked, and there either whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from lockstep.errors import DataError
from lockstep.scratch import partial_path, sweep_partials

LOGGER = logging.getLogger("lockstep")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Download:
    """A file that can be fetched.

    Attributes:
        urls: Where it can be had; the first that gives the right file wins.
        path: Where it is to be.
        md5: Its checksum as 32 hex digits. MD5 here guards against damage, not against forgery.
    """

    urls: tuple[str, ...]
    path: Path
    md5: str


def fetch(download: Download, *, otherwise: str, timeout_s: float = 20.0) -> None:
    """Fetch a file, unless it is there already.

    Of several processes on one machine, one fetches and the others wait for it.

    Args:
        download: What to fetch.
        otherwise: What a person can do where fetching is not possible.
        timeout_s: Longest wait for a server to answer.

    Raises:
        DataError: No address gives the right file, or the folder can't be written.
    """
    try:
        download.path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(download.path):
            if not download.path.exists():
                sweep_partials(download.path.parent, download.path.name)
                _fetch_from_any(download, otherwise, timeout_s)
    except OSError as error:
        raise DataError(
            f"{download.path} can't be written: {error.strerror or error}", fix=f"free the way, or {otherwise}"
        ) from error


def _fetch_from_any(download: Download, otherwise: str, timeout_s: float) -> None:
    faults = []
    for url in download.urls:
        LOGGER.warning("fetching %s", url)
        part = partial_path(download.path)
        try:
            fault = _fetch_one(url, part, download.md5, timeout_s)
            if fault is None:
                part.replace(download.path)
                return
            faults.append(f"{url}: {fault}")
        finally:
            part.unlink(missing_ok=True)
    raise DataError(f"{download.path.name} is not there and can't be fetched", tried="\n".join(faults), fix=otherwise)


def _fetch_one(url: str, part: Path, md5: str, timeout_s: float) -> str | None:
    """Write what an address gives to a file; returns what is wrong with it, None if all is well."""
    digest = hashlib.md5(usedforsecurity=False)
    with part.open("wb") as file:
        pieces = _read(url, timeout_s)
        while True:
            try:
                piece = next(pieces, None)
            except (OSError, HTTPException, ValueError) as error:
                cause = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
                return str(cause) or type(error).__name__
            if piece is None:
                break
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != md5:
        return f"another file: MD5 {digest.hexdigest()}, expected {md5}"
    return None


def _read(url: str, timeout_s: float) -> Iterator[bytes]:
    with urlopen(url, timeout=timeout_s) as answer:
        while piece := answer.read(_PIECE_BYTES):
            yield piece


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock beside a file; it goes with the process that holds it, however that ends."""
    lock = path.with_name(f".{path.name}.lock")
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "rb") as file:
        with suppress(OSError):  # without locks two processes may fetch the same file, each to a place of its own
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
