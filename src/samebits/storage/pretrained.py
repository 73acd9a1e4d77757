"""Pretrained weights: files of torch or safetensors, read without running code, and the part that fits a model."""

import argparse
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.errors import CheckpointError, wrapped
from samebits.plain_file import open_plain
from samebits.storage.weights import check_kinds, check_names, read

# Read files of torch.save with torch's weights-only reader, after a check of their unpacked size.


FETCH = "Copy or download it again, or give a file that torch.save or\nsafetensors wrote."

_ZIP_START = b"PK\x03\x04"
# Weights hardly compress, and torch does not compress them.
_MAX_RATIO = 4
_MAX_EXTRA_BYTES = 64 * 1024 * 1024


class _DType:
    """A replacement for numpy.dtype, whose unpickling needs more than a name."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code = code
        self.order = "<"

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
    except (
        Exception
    ) as error:  # for a truncated or altered file, torch's reader raises any kind of exception
        first = next(iter(str(error).splitlines()), "")
        # A text without a space is the key or value that the reader failed on: `101`.
        cause = first if " " in first else f"{type(error).__name__} {first}"
        raise CheckpointError(
            f"{path} can't be read as weights", cause=wrapped(cause), fix=FETCH
        ) from None


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


# Keys under which training scripts store the model's state_dict, most common first. `best_state_dict` is HRNet's.
# `model_ema` and `state_dict_ema` are not taken but named: users who need the average export it to its own file.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "best_state_dict", "net", "weights")
# Prefixes that wrappers add to each name: DataParallel and DDP, torch.compile.
_PREFIXES = ("module.", "_orig_mod.")
# A zip file, or a pickle of torch before 1.6; torch can read no other pickle protocol without running code.
_TORCH_STARTS = (b"PK", b"\x80\x02", b"\x80\x03")
_NAME_IT = "Select the model or the preset that the file was trained with"
_SHOWN = 4
_MAX_PREFIXES = 10


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a model's weights as named tensors of any shape on the CPU.

    Accepts a state_dict or a training script's checkpoint around one (.pth, .pt, .pth.tar, .bin), and safetensors. The
    content decides, not the file's name.

    Raises:
        CheckpointError: The file is missing, empty or damaged, holds no weights, or could run code when read.
    """
    return _read(Path(path).expanduser())[0]


def _read(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights in a file, as `read_state` does, and the names of averages beside them, which it has too."""
    start = _start_of(path)
    is_torch = start.startswith(_TORCH_STARTS)
    # A safetensors file begins with the length of a JSON object, in 8 bytes, and that object.
    if start[3:] == b"\0\0\0\0\0{" or (path.suffix == ".safetensors" and not is_torch):
        return _unprefixed(read(path)), []
    if not is_torch:
        raise CheckpointError(f"{path} is not a file of weights, or is damaged", fix=FETCH)
    content = read_torch_file(path)
    found = _state_in(content)
    if found is None:
        first = list(content)[:8] if isinstance(content, Mapping) else []
        # Keys that are not text or numbers could expand to any size.
        keys = ", ".join(
            str(key)[:60] if isinstance(key, (str, int)) else type(key).__name__ for key in first
        )
        raise CheckpointError(
            f"{path} holds no weights",
            given=f"a {type(content).__name__}" + (f" of {keys}" if keys else ""),
            allowed=f"a state_dict, or one under {', '.join(_WRAPPERS)}",
            fix="Save the model's state_dict to a new file: torch.save(model.state_dict(), NEW).",
        )
    check_names(found, path)
    averages = [
        str(name)[:60] for name in content if str(name).endswith("ema") and _state_in(content[name])
    ]
    return _unprefixed(found), averages


def load_pretrained(
    model: nn.Module,
    path: Path,
    *,
    skip: Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
) -> dict[str, str]:
    """Load the tensors of a file that match a model in name and shape. The rest of the model keeps its values.

    If nothing matches, the shortest common prefix of the file's names (up to a dot) without which some match is
    removed. Batch norm's counters (`num_batches_tracked`) are loaded but not counted: files from before torch 0.4.1
    lack them, and no result depends on them.

    Args:
        model: The model; changed in place.
        path: The file; see `read_state`.
        skip: Patterns (`fc.*`) of names in the model that keep their values.
        rename: Maps a name in the file to a name in the model.

    Returns:
        Rows for the run's header: tensors that were loaded, skipped and missing.

    Raises:
        CheckpointError: The file cannot be read, nothing in it matches, or it lacks a frozen parameter
            (`module.freeze`), which would keep its random values. The model is then unchanged.
    """
    path = Path(path).expanduser()
    state, averages = _read(path)
    if rename is not None:
        state = {rename(name): tensor for name, tensor in state.items()}
    ours = model.state_dict()
    wanted = {
        name: own
        for name, own in ours.items()
        if not any(fnmatchcase(name, pattern) for pattern in skip)
    }
    prefix = _prefix_in_the_way(wanted, state)
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    fits = _fitting(wanted, state)
    shapes = [
        f"{name} {_shape(state[name])} in the file, {_shape(own)} here"
        for name, own in wanted.items()
        if name in state and state[name].shape != own.shape
    ]
    if not _counted(fits):
        raise _fits_nothing(path, ours, state, shapes)
    frozen = [
        name for name, own in model.named_parameters() if name in wanted and not own.requires_grad
    ]
    if not set(fits).issuperset(frozen):
        raise _lacks_frozen(path, [name for name in frozen if name not in fits], len(frozen))
    check_kinds({name: state[name] for name in fits}, path)
    # state_dict() refers to the model's own tensors. Parameters can be changed in place only without autograd.
    with torch.no_grad():
        for name in fits:
            ours[name].copy_(state[name])
    counted = _counted(ours)
    loaded = _counted(fits)
    skipped = [name for name in counted if name not in wanted]
    missing = [name for name in counted if name in wanted and name not in state]
    left_out = [name for name in _counted(state) if name not in ours]
    num_values = sum(ours[name].numel() for name in loaded)
    taken_off = f', its names without "{prefix}"' if prefix else ""
    rows = {
        "weights": f"{len(loaded)} of {len(counted)} tensors, {num_values:,} values, from {path}{taken_off}",
        "average": averages
        and f"warning: the file has {', '.join(averages)} too, which is not taken; save it alone",
        "other shape": _some(shapes, len(shapes), "\n"),
        "skipped": _some(_grouped(skipped), len(skipped)),
        "missing": _some(_grouped(missing), len(missing)),
        "not used": _some(_grouped(left_out), len(left_out)),
    }
    return {name: text for name, text in rows.items() if text}


def load_strict(model: nn.Module, path: Path) -> None:
    """Load all weights of a model from a file; extra tensors in the file are ignored.

    Raises:
        CheckpointError: The file cannot be read, or lacks some of the weights.
    """
    rows = load_pretrained(model, path)
    lacking = [
        f"{name}: {text}" for name, text in rows.items() if name in ("other shape", "missing")
    ]
    if lacking:
        raise CheckpointError(
            f"{path} is of another model", cause="\n".join(lacking), fix=f"{_NAME_IT}."
        )


def _start_of(path: Path) -> bytes:
    """Read the first nine bytes of a file, which identify its format."""
    try:
        with open_plain(path) as file:
            start = file.read(9)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist",
            where=path.absolute().parent,
            fix="Correct the path in model.weights or on the command line.",
        ) from None
    except IsADirectoryError:
        raise CheckpointError(
            f"{path} is a folder", fix="Give the file of weights in it."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read",
            cause=error.strerror or error,
            fix="Make it a file that this user can read.",
        ) from None
    if not start:
        raise CheckpointError(f"{path} is empty", fix=FETCH)
    return start


def _state_in(content: Any, depth: int = 2) -> dict[str, Tensor] | None:
    """Find the first mapping of names to tensors in a file's content."""
    if not isinstance(content, Mapping):
        return None
    tensors = {
        name: value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    # A state_dict may also hold plain values (`_extra_state`), and a checkpoint single tensors (a step count).
    if tensors and len(tensors) > len(content) / 2:
        return tensors
    if depth:
        for name in _WRAPPERS:
            found = _state_in(content.get(name), depth - 1)
            if found is not None:
                return found
    return None


def _unprefixed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of wrappers from all names."""
    names = list(state)
    for _ in range(_MAX_PREFIXES):
        prefix = next(
            (each for each in _PREFIXES if all(name.startswith(each) for name in names)), ""
        )
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, state.values(), strict=True))


def _fitting(ours: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Return the model's names that the file has in the same shape."""
    return [name for name, own in ours.items() if name in state and state[name].shape == own.shape]


def _prefix_in_the_way(ours: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Return the shortest prefix of all names (up to a dot) without which some match; "" if some match with it."""
    # The one name of torch's AveragedModel that is not of the averaged model.
    state = {name: tensor for name, tensor in state.items() if not name.endswith("n_averaged")}
    first = next(iter(state), "")
    ends = (index + 1 for index, letter in enumerate(first) if letter == ".")
    for end in (0, *islice(ends, _MAX_PREFIXES)):
        bare = {
            name[end:]: tensor for name, tensor in state.items() if name.startswith(first[:end])
        }
        if len(bare) == len(state) and _counted(_fitting(ours, bare)):
            return first[:end]
    return ""


def _fits_nothing(
    path: Path, ours: Mapping[str, Tensor], state: Mapping[str, Tensor], shapes: Sequence[str]
) -> CheckpointError:
    file_names = _some([f"{name} {_shape(state[name])}" for name in state], len(state))
    model_names = _some([f"{name} {_shape(ours[name])}" for name in ours], len(ours))
    return CheckpointError(
        f"nothing in {path} fits the model",
        given=wrapped(f"the file has {file_names}"),
        allowed=wrapped(f"the model has {model_names}"),
        cause=_some(shapes, len(shapes), "\n"),
        fix=f"{_NAME_IT}.",
    )


def _lacks_frozen(path: Path, lacking: list[str], num_frozen: int) -> CheckpointError:
    return CheckpointError(
        f"{path} lacks {len(lacking)} of the {num_frozen} tensors that are frozen",
        given=wrapped(f"without {_some(_grouped(lacking), len(lacking))}"),
        cause="The file belongs to another network. The missing tensors would keep their random values.",
        fix=f"{_NAME_IT}, or freeze fewer layers.",
    )


def _counted(names: Iterable[str]) -> list[str]:
    """Return the names that are counted: all but the counters of batch norm and of AveragedModel."""
    return [name for name in names if not name.endswith(("num_batches_tracked", "n_averaged"))]


def _grouped(names: Sequence[str]) -> list[str]:
    """Group tensors by module: `fc (weight, bias)`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        groups.setdefault(module, []).append(last)
    return [
        f"{module} ({', '.join(lasts)})" if module else ", ".join(lasts)
        for module, lasts in groups.items()
    ]


def _some(texts: Sequence[str], count: int, between: str = ", ") -> str:
    """Join the first few texts, with the total number of tensors if some are left out."""
    if len(texts) <= _SHOWN:
        return between.join(texts)
    return f"{count} tensors: {between.join(texts[:_SHOWN])}{between}…"


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"
