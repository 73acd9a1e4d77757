"""`shared.json`: the checkpoint of another run that a run's first steps were copied from, as a sweep does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samebits.config.plain_file import MAX_MEMORY_BYTES, parse_json, read_plain

FILE_NAME = "shared.json"
_MAX_BYTES = 64 * 1024


def read_shared(run: Path) -> tuple[int, str, str]:
    """Return the number of copied steps, the checkpoint they are from, and the SHA-256 of its weights.

    Without a readable file, these are 0 and empty texts.
    """
    try:
        plain = parse_json(read_plain(run / FILE_NAME, _MAX_BYTES), MAX_MEMORY_BYTES)
        num_steps, checkpoint, sha256 = plain["steps"], plain["checkpoint"], plain["sha256"]["weights.safetensors"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, "", ""
    is_valid = type(num_steps) is int and 0 < num_steps < 1 << 53 and isinstance(checkpoint, str)
    return (num_steps, checkpoint[:300], str(sha256)[:64]) if is_valid else (0, "", "")


def shared_steps(run: Path) -> list[dict[str, Any]]:
    """Return the entry of a run's statement that names the checkpoint; none if the run has trained all of its steps."""
    num_steps, checkpoint, sha256 = read_shared(run)
    if not num_steps:
        return []
    return [{"name": f"first {num_steps} steps", "uri": checkpoint, "digest": {"sha256": sha256}}]
