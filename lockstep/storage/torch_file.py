"""Reads files of torch.save, after a look at what they would unpack to and at what their pickles hold.

Zip files can be written so that two readers see two contents: with two directories, or names that differ in case. So
sizes are read from the directory that torch reads too, and pickles by torch's own reader.
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

from lockstep.config.explain import wrapped
from lockstep.errors import CheckpointError
from lockstep.storage.pickle_walk import walk_pickle

FETCH = "copy or download it again, or name a file that torch.save or\nsafetensors wrote"

_ZIP_START = b"PK\x03\x04"
_TAR_BLOCK = 512
# Weights hardly get smaller by packing; torch itself does not pack them.
_MAX_RATIO = 4
_MAX_EXTRA_BYTES = 64 * 1024 * 1024
_MAX_MEMBERS = 100_000
_MAX_PICKLE_BYTES = 64 * 1024 * 1024
_NUM_OLD_PICKLES = 5  # the form before torch 1.6: magic number, version, system, content, names of storages

_END = struct.Struct("<4s4H2LH")  # of a zip file: signature, disks, members, the directory's size and place, comment
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


class _DType:
    """Stands for numpy's own, whose way of being unpickled takes more than a name."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _number(dtype: _DType, data: bytes | str = b"") -> float:
    """A numpy scalar, such as the best score so far, which training scripts keep beside the weights."""
    kind = np.dtype(dtype.order + dtype.code)
    if kind.kind not in "fiub":
        raise pickle.UnpicklingError(f"GLOBAL numpy.{kind}")
    return float(np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, kind)[0])


# What training scripts put beside the weights besides plain values, and what it becomes here: nothing that acts.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    (PurePosixPath, "pathlib.PosixPath"),
    (PurePosixPath, "pathlib._local.PosixPath"),
    (_DType, "numpy.dtype"),
    (_number, "numpy.core.multiarray.scalar"),
    (_number, "numpy._core.multiarray.scalar"),
]


def read_torch_file(path: Path) -> Any:
    """What torch.save wrote, on the CPU. Runs no code from the file.

    Raises:
        CheckpointError: It can't be read, or could run code.
    """
    try:
        # One opened file, so that what was checked is what is read.
        with path.open("rb") as file, torch.serialization.safe_globals(_HARMLESS):
            _check_file(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, so reading it could run code from it",
            found=_unknown_kind(str(error)),
            fix="where you trust its source, write its weights alone to a new file:\n"
            "held = torch.load(FILE, weights_only=False)\n"
            "torch.save(held['state_dict'], NEW)\n"
            "or, where it holds a whole model:\n"
            "torch.save(held.state_dict(), NEW)",
        ) from None
    except Exception as error:  # of files that were cut off or altered, torch's reader raises whatever comes up
        first = next(iter(str(error).splitlines()), "")
        # One word is the key or the value that a reader stumbled over: `101`.
        reason = first if " " in first else f"{type(error).__name__} {first}"
        raise CheckpointError(f"{path} can't be read as weights", reason=wrapped(reason), fix=FETCH) from None


def _unknown_kind(text: str) -> str | None:
    """The class that torch did not want to make, out of its long text."""
    _, found, rest = text.partition("GLOBAL ")
    return rest.split()[0].strip("`'\"") if found and rest.split() else None


def _check_file(file: IO[bytes]) -> None:
    """See that a file of torch.save can be read with memory and time of the order of its size.

    Args:
        file: At its start, where it is left too.

    Raises:
        ValueError: It can't.
        UnpicklingError: It holds more than tensors and plain values.
        OSError: It can't be read.
        Exception: What the readers of zip and pickle raise of a damaged file.
    """
    start = file.read(_TAR_BLOCK)
    file.seek(0)
    if start.startswith(_ZIP_START):
        _check_zip(file)
    else:
        if _is_tar(start):  # the oldest form, which torch reads only with code in it
            raise ValueError("it is a tar file")
        *_, content, names = (walk_pickle(file) for _ in range(_NUM_OLD_PICKLES))
        if not content.storages <= names.texts:  # torch would take whatever is in memory
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
    """See that a zip file's directory lies right before its end: then all readers find the same one."""
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
