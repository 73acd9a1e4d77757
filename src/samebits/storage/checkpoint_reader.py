"""Verified checkpoints, read into memory one tensor at a time."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from samebits.config.plain_file import open_plain
from samebits.errors import CheckpointError, cannot_read
from samebits.storage.checkpoint import file_of
from samebits.storage.manifest import (
    MAX_STATE_BYTES,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    check_file,
    check_limit,
    manifest_of,
    read_state,
)
from samebits.storage.tensor_file import check_header, dtype_of

Shape = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Opened:
    """A verified checkpoint with only names and shapes in memory."""

    path: Path  #: The checkpoint's folder.
    plain: dict[str, Any]  #: All state but tensors, as `pack` returns it.
    shapes: dict[str, Shape]  #: Shape and dtype of each tensor, by name.

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, of any shape, on the CPU."""
        file = file_of(name)
        with safe_open(self.path / file, "pt") as opened:
            found: Tensor = opened.get_tensor(name)
        return found


def open_checkpoint(path: Path, limits: Mapping[str, int] | None = None) -> Opened:
    """Verify a checkpoint in pieces, without reading its tensors into memory; `limits` as for `load_checkpoint`.

    Raises:
        CheckpointError: A file is missing, truncated, altered or too large.
    """
    limits = {STATE: MAX_STATE_BYTES, **(limits or {})}
    for name, expected in manifest_of(path).items():
        try:
            with open_plain(path / name) as file:
                # The size first: hashing a file of terabytes only to refuse it would take hours.
                if (size := os.fstat(file.fileno()).st_size) != expected.get("bytes"):
                    check_file(path / name, expected, size, "")
                check_limit(path / name, size, limits.get(name))
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                check_file(path / name, expected, file.tell(), sha256)
        except OSError as error:
            raise cannot_read(CheckpointError, path / name, error, "Make it a file that this user can read.") from None
    shapes: dict[str, Shape] = {}
    try:
        for file_name in (WEIGHTS, OPTIMIZER):
            # The library would read a header of any size up to 100 MB into memory.
            check_header(path / file_name)
            with safe_open(path / file_name, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    part = opened.get_slice(name)
                    shapes[name] = torch.Size(part.get_shape()), dtype_of(part.get_dtype(), path / file_name)
    except (SafetensorError, OSError, MemoryError) as error:
        raise CheckpointError(
            f"{path} can't be read as safetensors", cause=str(error)[:500], fix="Use an earlier checkpoint."
        ) from None
    return Opened(path, read_state(path), shapes)
