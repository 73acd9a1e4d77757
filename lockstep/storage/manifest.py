"""The files of a checkpoint, read as its manifest has them: with the size and SHA-256 that they were written with."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.plain_file import MAX_MEMORY_BYTES, parse_json, read_plain
from lockstep.errors import CheckpointError

FORMAT = 1
MAX_STATE_BYTES = 16 * 1024 * 1024
WEIGHTS, OPTIMIZER, STATE, MANIFEST = "weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"


def manifest_of(path: Path) -> dict[str, dict[str, Any]]:
    """What a checkpoint's manifest says of each of its files; a CheckpointError where it is damaged."""
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')}, this version reads {FORMAT}")
    files = manifest.get("files")
    known: dict[str, Any] = files if isinstance(files, dict) else {}
    for name in (WEIGHTS, OPTIMIZER, STATE):
        if not isinstance(known.get(name), dict):
            raise CheckpointError(f"{path / MANIFEST} was altered: it says nothing of {name}")
    return {name: known[name] for name in (WEIGHTS, OPTIMIZER, STATE)}


def check_file(path: Path, expected: dict[str, Any], num_bytes: int, sha256: str) -> None:
    """See that a file is as the manifest has it; a CheckpointError where it is torn or altered."""
    if num_bytes != expected.get("bytes"):
        raise CheckpointError(f"{path} is torn: {num_bytes} of {expected.get('bytes')} bytes")
    if sha256 != expected.get("sha256"):
        raise CheckpointError(f"{path} was altered: its SHA-256 is not the manifest's")


def read_state(path: Path) -> dict[str, Any]:
    """All of a checkpoint but its tensors, as `pack` has it, verified.

    Raises:
        CheckpointError: The file is missing, torn or altered.
    """
    return parse_object(path / STATE, verified(path / STATE, manifest_of(path)[STATE], MAX_STATE_BYTES))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
        CheckpointError: The file is missing, torn or altered.
    """
    return parse_object(path, _read(path, MAX_STATE_BYTES))


def check_limit(path: Path, num_bytes: object, max_bytes: int | None) -> None:
    """See that a file of a checkpoint is no larger than one that this run would write; asked before it is read.

    Args:
        path: The file.
        num_bytes: What it has, or what the manifest says.
        max_bytes: None: any size is right.

    Raises:
        CheckpointError: It is larger.
    """
    if max_bytes is not None and isinstance(num_bytes, int) and num_bytes > max_bytes:
        raise CheckpointError(
            f"{path} has {num_bytes:,} bytes, more than this model's can have",
            allowed=f"at most {max_bytes:,} bytes",
            cause="it is of another model, or not from Lockstep",
        )


def verified(path: Path, expected: dict[str, Any], max_bytes: int | None = None) -> bytes:
    """A file as the manifest has it. No more of it is read than the manifest says.

    Args:
        path: The file.
        expected: What the manifest says of it.
        max_bytes: The most that is read.

    Raises:
        CheckpointError: The file is missing, torn or altered, or too large.
    """
    num_bytes = expected.get("bytes")
    check_limit(path, num_bytes, max_bytes)
    with suppress(OSError):
        if (size := path.stat().st_size) != num_bytes and path.is_file():
            check_file(path, expected, size, "")
    content = _read(path, num_bytes if isinstance(num_bytes, int) else 0)
    check_file(path, expected, len(content), sha256_of(content))
    return content


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        return read_plain(path, max_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from None


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        CheckpointError: It holds none.
    """
    try:
        value = parse_json(content, MAX_MEMORY_BYTES)
    except ValueError:
        raise CheckpointError(f"{path} is torn: not JSON") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} was altered: not a JSON object")
    return value


def sha256_of(content: bytes) -> str:
    """The SHA-256 of a file's content, as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()
