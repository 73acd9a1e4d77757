"""The manifest of a checkpoint: size and SHA-256 of each file, and reads that verify them."""

import errno
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from samebits.errors import CheckpointError, cannot_read
from samebits.plain_file import MAX_MEMORY_BYTES, as_dict, parse_json, read_plain

FORMAT = 1
MAX_STATE_BYTES = 16 * 1024 * 1024
_MAX_SPARSE_BYTES = 1 << 30
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
FILES = (MANIFEST, STATE, OPTIMIZER, WEIGHTS)
_EARLIER = "Use an earlier checkpoint, or copy this one again from its source."


def manifest_of(path: Path) -> dict[str, dict[str, Any]]:
    """Read the manifest's entry of each file.

    Raises:
        CheckpointError: The manifest is missing or damaged, or has another format.
    """
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {manifest.get('format')}",
            allowed=f"format {FORMAT}",
            fix="Use the version of Samebits that wrote it.",
        )
    known = as_dict(manifest.get("files"))
    for name in (WEIGHTS, OPTIMIZER, STATE):
        if not isinstance(known.get(name), dict):
            raise CheckpointError(
                f"{path / MANIFEST} was altered: it has no entry for {name}", fix=_EARLIER
            )
    return {name: known[name] for name in (WEIGHTS, OPTIMIZER, STATE)}


def check_file(path: Path, expected: dict[str, Any], num_bytes: int, sha256: str) -> None:
    """Check a file's size and hash (64 hex digits) against its entry in the manifest."""
    if num_bytes != expected.get("bytes"):
        raise CheckpointError(
            f"{path} is truncated: {num_bytes} of {expected.get('bytes')} bytes", fix=_EARLIER
        )
    if sha256 != expected.get("sha256"):
        raise CheckpointError(
            f"{path} was altered: its SHA-256 is not the manifest's", fix=_EARLIER
        )


def read_state(path: Path) -> dict[str, Any]:
    """Read and verify all state of a checkpoint but its tensors, as `pack` returns it.

    Raises:
        CheckpointError: The file is missing, truncated or altered.
    """
    return parse_object(
        path / STATE, verified(path / STATE, manifest_of(path)[STATE], MAX_STATE_BYTES)
    )


def run_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's identity from a checkpoint's state; empty if the checkpoint predates it."""
    return as_dict(plain.get("run"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint. Raises CheckpointError if the file is missing, truncated or altered."""
    return parse_object(path, _read(path, MAX_STATE_BYTES))


def check_limit(path: Path, num_bytes: object, max_bytes: int | None) -> None:
    """Refuse a file that is larger than any that this run would write, before it is read; None: no limit."""
    if max_bytes is not None and isinstance(num_bytes, int) and num_bytes > max_bytes:
        raise CheckpointError(
            f"{path} has {num_bytes:,} bytes, more than this model's can have",
            allowed=f"at most {max_bytes:,} bytes",
            cause="It belongs to another model, or Samebits did not write it.",
            fix="Use a checkpoint of this model.",
        )


def check_size(path: Path, expected: dict[str, Any]) -> None:
    """Check a file's size against its entry in the manifest, without reading it; a missing file is left to its reader.

    Raises:
        CheckpointError: The file has another size.
    """
    with suppress(OSError):
        if (size := path.stat().st_size) != expected.get("bytes") and path.is_file():
            check_file(path, expected, size, "")


def verified(path: Path, expected: dict[str, Any], max_bytes: int | None = None) -> bytes:
    """Read a file and verify it against its manifest entry. At most that size is read; `max_bytes` None: no limit.

    Raises:
        CheckpointError: The file is missing, truncated, altered or too large.
    """
    num_bytes = expected.get("bytes")
    check_limit(path, num_bytes, max_bytes)
    check_size(path, expected)
    content = _read(path, num_bytes if isinstance(num_bytes, int) else 0)
    check_file(path, expected, len(content), sha256_of(content))
    return content


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        return read_plain(path, max_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", fix=_EARLIER) from None
    except OSError as error:
        raise cannot_read(
            CheckpointError, path, error, "Make it a file that this user can read."
        ) from None


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """Parse the JSON object in a file's content. Raises CheckpointError if the content is not a JSON object."""
    try:
        value = parse_json(content, MAX_MEMORY_BYTES)
    except ValueError:
        raise CheckpointError(f"{path} is truncated: not JSON", fix=_EARLIER) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} was altered: not a JSON object", fix=_EARLIER)
    return value


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a regular file, as 64 hex digits.

    Raises:
        OSError: The file cannot be read, or is large and a hole from its beginning on.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # An archive of a few bytes unpacks to 40 GB of nothing, which take minutes to hash. Not by the number of
        # blocks, which network file systems do not report; those without holes answer with the size.
        if size > _MAX_SPARSE_BYTES and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size // 16:
            raise OSError(errno.EFBIG, f"it is a sparse file of {size:,} bytes")
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 of a content, as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()
