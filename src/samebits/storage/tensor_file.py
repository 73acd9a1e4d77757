"""Write tensors in the safetensors format directly from their memory.

The library's own `save` first builds the whole file in memory and holds the GIL for much of that, which would stop
training. Here the slow parts (hashing, writing, flushing) release the GIL. Files are read with the library.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from samebits.bits import as_bytes
from samebits.errors import CheckpointError
from samebits.plain_file import open_plain

# Names in the format, https://github.com/huggingface/safetensors.
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_TYPES_BY_NAME = {name: dtype for dtype, name in TYPES.items()}
MAX_HEADER_BYTES = 16 * 1024 * 1024  # about 150,000 tensors; the library reads up to 100 MB
_PIECE_BYTES = 4 * 1024 * 1024  # hashed while it is still in the CPU cache from being read


def header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Build the header of a file and the order of its tensors, of any shape, which follow without gaps.

    Wide dtypes come first, as in the library, so that each value is aligned to its size.

    Raises:
        ValueError: The format has no name for a tensor's dtype.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in TYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which can't be saved")
        start = end
        end = end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # The format aligns the data to 8 bytes by spaces behind the header, which JSON ignores.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def check_header(path: Path) -> None:
    """Refuse a file whose header is larger than any model needs, and what is no regular file."""
    with open_plain(path) as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise OSError(
            errno.EFBIG, f"its header has {size:,} bytes, and at most {MAX_HEADER_BYTES:,} are read"
        )


def dtype_of(name: str, path: Path) -> torch.dtype:
    """Return the torch dtype of a dtype name in a file's header.

    Raises:
        CheckpointError: Checkpoints have no tensors of this dtype.
    """
    if name not in _TYPES_BY_NAME:
        raise CheckpointError(
            f"{path} has a tensor of type {name}",
            allowed=", ".join(_TYPES_BY_NAME),
            fix="Convert it, and save the weights again.",
        )
    return _TYPES_BY_NAME[name]


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    moved: Callable[[int], object] = lambda _: None,
) -> tuple[int, str]:
    """Write a file and flush it to disk; return its size in bytes and its SHA-256.

    Args:
        path, moved: The file; called with the number of bytes after each write.
        tensors: Tensors on the CPU, of any shape and strides; the file holds them contiguous.

    Raises:
        OSError: It cannot be written.
    """
    beginning, order = header(tensors)
    digest = hashlib.sha256(beginning)
    size = len(beginning)
    with path.open("wb") as file:
        file.write(beginning)
        for name in order:
            content = as_bytes(tensors[name]).numpy().data
            for start in range(0, len(content), _PIECE_BYTES):
                piece = content[start : start + _PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
                size += len(piece)
                moved(len(piece))
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()
