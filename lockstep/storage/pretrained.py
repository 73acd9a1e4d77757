"""Weights from elsewhere: a file that torch or safetensors wrote, read without running code, and what of it fits."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.explain import wrapped
from lockstep.errors import CheckpointError
from lockstep.storage.torch_file import FETCH, read_torch_file
from lockstep.storage.weights import check_kinds, check_names, read

# Under which a training script's checkpoint keeps the model's weights, the likeliest first. `best_state_dict` is
# HRNet's; `model_ema` and `state_dict_ema` stay out: who wants those says so with the file that they export.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "best_state_dict", "net", "weights")
# What wraps a module puts this before each name: DataParallel and DDP, torch.compile.
_PREFIXES = ("module.", "_orig_mod.")
# A zip, or the pickle of torch before 1.6. Of its protocols, torch reads no others without running code.
_TORCH_STARTS = (b"PK", b"\x80\x02", b"\x80\x03")
_NAME_IT = "name the model or the preset that the file was made with"
_SHOWN = 4
_MAX_PREFIXES = 10


def read_state(path: Path) -> dict[str, Tensor]:
    """The named tensors of a model's weights, on the CPU.

    Takes a state_dict or a training script's checkpoint around one (.pth, .pt, .pth.tar, .bin), and .safetensors.

    Raises:
        CheckpointError: The file is missing, empty, damaged, holds no weights, or could run code when it is read.
    """
    path = Path(path).expanduser()
    start = _start_of(path)
    if path.suffix == ".safetensors":
        return _unprefixed(read(path))
    if start not in _TORCH_STARTS:
        raise CheckpointError(f"{path} is not a file of weights, or is damaged", fix=FETCH)
    content = read_torch_file(path)
    found = _state_in(content)
    if found is None:
        keys = _keys_of(content)
        raise CheckpointError(
            f"{path} holds no weights",
            found=f"a {type(content).__name__}" + (f" of {keys}" if keys else ""),
            allowed=f"a state_dict, or one under {', '.join(_WRAPPERS)}",
        )
    check_names(found, path)
    return _unprefixed(found)


def load_pretrained(
    model: nn.Module, path: Path, *, skip: Sequence[str] = (), rename: Callable[[str], str] | None = None
) -> dict[str, str]:
    """Give a model what fits of a file's weights: of one name and one shape. The rest of the model stays as it is.

    Where nothing fits, what all names of the file begin with, up to a dot, is taken off them if they fit without it.
    Batch norms' counters (`num_batches_tracked`) are loaded too, and are in none of the figures: files from before
    torch 0.4.1 lack them, and nothing is computed from them.

    Args:
        model: Changed in place.
        path: As for `read_state`.
        skip: Patterns (`fc.*`) of names of the model that are left as they are.
        rename: From a name in the file to one in the model.

    Returns:
        Rows for a run's head: what was loaded, left out and missing.

    Raises:
        CheckpointError: The file can't be read, nothing of it fits, or it lacks a parameter that is frozen
            (`engine.freeze`), which would stay random. The model is then as it was.
    """
    path = Path(path).expanduser()
    state = read_state(path)
    if rename is not None:
        state = {rename(name): tensor for name, tensor in state.items()}
    ours = model.state_dict()
    wanted = {name: own for name, own in ours.items() if not any(fnmatchcase(name, pattern) for pattern in skip)}
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
    frozen = [name for name, own in model.named_parameters() if name in wanted and not own.requires_grad]
    if not set(fits).issuperset(frozen):
        raise _lacks_frozen(path, [name for name in frozen if name not in fits], len(frozen))
    check_kinds({name: state[name] for name in fits}, path)
    with torch.no_grad():
        for name in fits:
            ours[name].copy_(state[name])
    counted, loaded = _counted(ours), _counted(fits)
    skipped = [name for name in counted if name not in wanted]
    missing = [name for name in counted if name in wanted and name not in state]
    left_out = [name for name in _counted(state) if name not in ours]
    num_values = sum(ours[name].numel() for name in loaded)
    taken_off = f', its names without "{prefix}"' if prefix else ""
    rows = {
        "weights": f"{len(loaded)} of {len(counted)} tensors, {num_values:,} values, from {path}{taken_off}",
        "other shape": _some(shapes, len(shapes), "\n"),
        "skipped": _some(_grouped(skipped), len(skipped)),
        "missing": _some(_grouped(missing), len(missing)),
        "not used": _some(_grouped(left_out), len(left_out)),
    }
    return {name: text for name, text in rows.items() if text}


def load_strict(model: nn.Module, path: Path) -> None:
    """Give a model all of its weights from a file; what else is in the file is left out.

    Raises:
        CheckpointError: The file can't be read, or has not all of them.
    """
    rows = load_pretrained(model, path)
    lacking = {name: text for name, text in rows.items() if name in ("other shape", "missing")}
    if lacking:
        raise CheckpointError(f"{path} is of another model", **lacking, fix=_NAME_IT)


def _start_of(path: Path) -> bytes:
    """The first two bytes of a file, by which one of weights is known."""
    try:
        if not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file", fix="name a file of weights")
        with path.open("rb") as file:
            start = file.read(2)
    except FileNotFoundError:
        where = f"looked for in {path.absolute().parent}"
        do = "see that the path is right, in model.weights or where else it is given"
        raise CheckpointError(f"{path} does not exist", where=where, fix=do) from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder", fix="name the file of weights in it") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read", reason=error.strerror or error) from None
    if not start:
        raise CheckpointError(f"{path} is empty", fix=FETCH)
    return start


def _keys_of(content: Any) -> str:
    """The first keys of a mapping that can be shown: a tuple or a tensor may stand for any number of values."""
    keys = list(content)[:8] if isinstance(content, Mapping) else []
    return ", ".join(str(key)[:60] if isinstance(key, (str, int)) else type(key).__name__ for key in keys)


def _state_in(content: Any, depth: int = 2) -> dict[str, Tensor] | None:
    """The first mapping of names to tensors in what a file held."""
    if not isinstance(content, Mapping):
        return None
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    # A state_dict may have plain values too (`_extra_state`), a checkpoint a tensor beside it (a step count).
    if tensors and len(tensors) > len(content) / 2:
        return tensors
    if depth:
        for name in _WRAPPERS:
            found = _state_in(content.get(name), depth - 1)
            if found is not None:
                return found
    return None


def _unprefixed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names as the bare module has them."""
    names = list(state)
    for _ in range(_MAX_PREFIXES):
        prefix = next((each for each in _PREFIXES if all(name.startswith(each) for name in names)), "")
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, state.values(), strict=True))


def _fitting(ours: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """The model's names that the file has too, in the same shape."""
    return [name for name, own in ours.items() if name in state and state[name].shape == own.shape]


def _prefix_in_the_way(ours: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """The shortest prefix of all names of a file, up to a dot, without which some fit; empty if some do with it."""
    first = next(iter(state), "")
    ends = (place + 1 for place, letter in enumerate(first) if letter == ".")
    for end in (0, *islice(ends, _MAX_PREFIXES)):
        bare = {name[end:]: tensor for name, tensor in state.items() if name.startswith(first[:end])}
        if len(bare) == len(state) and _counted(_fitting(ours, bare)):
            return first[:end]
    return ""


def _fits_nothing(
    path: Path, ours: Mapping[str, Tensor], state: Mapping[str, Tensor], shapes: Sequence[str]
) -> CheckpointError:
    return CheckpointError(
        f"nothing in {path} fits the model",
        file=wrapped(_some([f"{name} {_shape(state[name])}" for name in state], len(state))),
        model=wrapped(_some([f"{name} {_shape(ours[name])}" for name in ours], len(ours))),
        shapes=_some(shapes, len(shapes), "\n"),
        fix=_NAME_IT,
    )


def _lacks_frozen(path: Path, lacking: list[str], num_frozen: int) -> CheckpointError:
    return CheckpointError(
        f"{path} lacks {len(lacking)} of the {num_frozen} tensors that are frozen",
        lacking=wrapped(_some(_grouped(lacking), len(lacking))),
        cause="it is of another network, and what is missing would stay random",
        fix=f"{_NAME_IT}, or freeze less",
    )


def _counted(names: Iterable[str]) -> list[str]:
    """Those of tensors that are in the figures: all but batch norms' counters."""
    return [name for name in names if not name.endswith("num_batches_tracked")]


def _grouped(names: Sequence[str]) -> list[str]:
    """Tensors by the module that they belong to: `fc (weight, bias)`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        groups.setdefault(module, []).append(last)
    return [f"{module} ({', '.join(lasts)})" if module else ", ".join(lasts) for module, lasts in groups.items()]


def _some(texts: Sequence[str], count: int, between: str = ", ") -> str:
    """The first few, with how many tensors there are in all where that does not show."""
    if len(texts) <= _SHOWN:
        return between.join(texts)
    return f"{count} tensors: {between.join(texts[:_SHOWN])}{between}…"


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"
