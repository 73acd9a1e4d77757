"""Read files of torch.save, after checks of their unpacked size and of their pickles.

A zip file can show different contents to two readers: with two directories, or with names that differ in case only.
Therefore the sizes come from the directory that torch reads too, and the pickle comes from torch's own reader.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch

from samebits.config.explain import wrapped
from samebits.errors import CheckpointError
from samebits.storage.pickle_walk import walk_pickle

FETCH = "Copy or download it again, or give a file that torch.save or\nsafetensors wrote."

_ZIP_START = b"PK\x03\x04"
_TAR_BLOCK = 512
# Weights hardly compress, and torch does not compress them.
_MAX_RATIO = 4
_MAX_EXTRA_BYTES = 64 * 1024 * 1024
_MAX_MEMBERS = 100_000
_MAX_PICKLE_BYTES = 64 * 1024 * 1024
_NUM_OLD_PICKLES = 5  # the format before torch 1.6: magic number, version, system, content, names of storages

_END = struct.Struct("<4s4H2LH")  # of a zip file: signature, disks, members, size and offset of the directory, comment
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


class _DType:
    """A replacement for numpy.dtype, whose unpickling needs more than a name."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _number(dtype: _DType, data: bytes | str = b"") -> float:
    """Convert a numpy scalar, such as the best score so far, which training scripts store beside the weights."""
    kind = np.dtype(dtype.order + dtype.code)
    if kind.kind not in "fiub":
        raise pickle.UnpicklingError(f"GLOBAL numpy.{kind}")
    return float(np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, kind)[0])


# Classes that training scripts store beside the weights, and their inert replacements.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    (PurePosixPath, "pathlib.PosixPath"),
    (PurePosixPath, "pathlib._local.PosixPath"),
    (_DType, "numpy.dtype"),
    (_number, "numpy.core.multiarray.scalar"),
    (_number, "numpy._core.multiarray.scalar"),
]


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save, on the CPU. Runs no code from the file.

    Raises:
        CheckpointError: It cannot be read, or could run code.
    """
    try:
        # The file is opened once, so that the checked file is the one that is read.
        with path.open("rb") as file, torch.serialization.safe_globals(_HARMLESS):
            _check_file(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, so reading it could run code from it",
            given=_unknown_kind(str(error)),
            fix="If you trust its source, write its weights alone to a new file:\n"
            "content = torch.load(FILE, weights_only=False)\n"
            "torch.save(content['state_dict'], NEW)\n"
            "or, if it holds a whole model:\n"
            "torch.save(content.state_dict(), NEW)",
        ) from None
    except Exception as error:  # for a truncated or altered file, torch's reader raises any kind of exception
        first = next(iter(str(error).splitlines()), "")
        # A text without a space is the key or value that the reader failed on: `101`.
        cause = first if " " in first else f"{type(error).__name__} {first}"
        raise CheckpointError(f"{path} can't be read as weights", cause=wrapped(cause), fix=FETCH) from None


def _unknown_kind(text: str) -> str | None:
    """Extract the class that torch refused from its long text."""
    _, found, rest = text.partition("GLOBAL ")
    return rest.split()[0].strip("`'\"") if found and rest.split() else None


def _check_file(file: IO[bytes]) -> None:
    """Check that reading a file of torch.save takes memory and time in proportion to its size.

    Args:
        file: The file, at its start; also left there.

    Raises:
        ValueError: It does not.
        UnpicklingError: It holds more than tensors and plain values.
        OSError: It cannot be read.
        Exception: Raised by the zip or pickle reader for a damaged file.
    """
    start = file.read(_TAR_BLOCK)
    file.seek(0)
    if start.startswith(_ZIP_START):
        _check_zip(file)
    else:
        if _is_tar(start):  # the oldest format, which torch cannot read without running code
            raise ValueError("it is a tar file")
        *_, content, names = (walk_pickle(file) for _ in range(_NUM_OLD_PICKLES))
        if not content.storages <= names.texts:  # torch would return uninitialized memory
            raise ValueError("it lacks the values of some of its tensors")
    file.seek(0)


def _is_tar(start: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _check_zip(file: IO[bytes]) -> None:
    num_bytes = file.seek(0, os.SEEK_END)
    _check_end(file, num_bytes)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    total = sum(member.file_size for member in members)
    if total > _MAX_RATIO * num_bytes + _MAX_EXTRA_BYTES:
        raise ValueError(f"its {num_bytes:,} bytes would unpack to {total:,}")
    if len(members) > _MAX_MEMBERS:
        raise ValueError(f"it is a zip file of {len(members):,} members, at most {_MAX_MEMBERS:,} are read")
    file.seek(0)
    reader = torch._C.PyTorchFileReader(file)
    content = reader.get_record("data.pkl")
    if len(content) > _MAX_PICKLE_BYTES:
        raise ValueError(f"its pickle unpacks to {len(content):,} bytes")
    walk_pickle(io.BytesIO(content))


def _check_end(file: IO[bytes], num_bytes: int) -> None:
    """Check that a zip file's directory lies right before its end, so that all readers find the same one."""
    file.seek(max(0, num_bytes - _END.size - _END64_LOCATOR.size))
    tail = file.read()
    signature, *_, size, start, comment = _END.unpack(tail[-_END.size :])
    end = num_bytes - _END.size
    if len(tail) > _END.size and tail.startswith(b"PK\x06\x07"):
        _, _, end, _ = _END64_LOCATOR.unpack(tail[: _END64_LOCATOR.size])
        if end + _END64.size + len(tail) != num_bytes:
            raise ValueError("its zip directory is not where it should be")
        file.seek(end)
        signature64, *_, size, start = _END64.unpack(file.read(_END64.size))
        if signature64 != b"PK\x06\x06":
            raise ValueError("its zip directory is not where it should be")
    if signature != b"PK\x05\x06" or comment or start + size != end:
        raise ValueError("it was cut off, or its zip directory is not where it should be")
