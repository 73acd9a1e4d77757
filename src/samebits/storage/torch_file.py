"""Read files of torch.save with torch's weights-only reader, after a check of their unpacked size."""

import argparse
import os
import pickle
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch

from samebits.config.explain import wrapped
from samebits.errors import CheckpointError

FETCH = "Copy or download it again, or give a file that torch.save or\nsafetensors wrote."

_ZIP_START = b"PK\x03\x04"
# Weights hardly compress, and torch does not compress them.
_MAX_RATIO = 4
_MAX_EXTRA_BYTES = 64 * 1024 * 1024


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
            _check_zip(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # The class that torch refused, from its long text.
        _, is_named, rest = str(error).partition("GLOBAL ")
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, so reading it could run code from it",
            given=rest.split()[0].strip("`'\"") if is_named and rest.split() else None,
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


def _check_zip(file: IO[bytes]) -> None:
    """Refuse a zip file that would unpack to far more than its size. Files of torch before 1.6 are not zip files.

    Raises:
        ValueError: It would.
        zipfile.BadZipFile: It is damaged.
    """
    if file.read(len(_ZIP_START)) == _ZIP_START:
        num_bytes = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            total = sum(member.file_size for member in archive.infolist())
        if total > _MAX_RATIO * num_bytes + _MAX_EXTRA_BYTES:
            raise ValueError(f"its {num_bytes:,} bytes would unpack to {total:,}")
    # torch.load reads from the current position.
    file.seek(0)
