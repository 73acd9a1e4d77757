"""Files of weights, and the hash of weights."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from samebits.bits import as_bytes
from samebits.errors import CheckpointError
from samebits.storage.checkpoint import (
    BEST,
    Checkpoint,
    load_checkpoint,
    name_of,
    newest,
    steps,
)
from samebits.storage.manifest import OPTIMIZER, WEIGHTS, check_limit, read_json, read_state, run_of
from samebits.storage.run_folder import RunFolder, atomic_file
from samebits.storage.tensor_file import (
    MAX_HEADER_BYTES,
    TYPES,
    check_header,
    dtype_of,
    write_tensors,
)

_MAX_NAME = 500  # characters
_COPIED = frozenset({*TYPES, torch.float8_e4m3fn, torch.float8_e5m2})


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a state_dict with tensors of any shape.

    It covers name, dtype, shape and bytes of each tensor, sorted by name.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(as_bytes(tensor).numpy().data)
    return digest.hexdigest()


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state_dict, with tensors of any shape, as a safetensors file, atomically and without a copy in memory.

    Raises:
        CheckpointError: It cannot be written.
    """
    with atomic_file(path) as partial:
        # On a CPU, `cpu` returns the tensor itself without a copy.
        write_tensors(partial, {name: tensor.detach().cpu() for name, tensor in state.items()})


def read(path: Path, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Read the tensors, of any shape, of a safetensors file that fits the model, on the CPU. Runs no code from it.

    Raises:
        CheckpointError: The file is missing or damaged, or belongs to another model.
    """
    try:
        check_header(path)
        if model is not None:
            check_limit(path, path.stat().st_size, file_limits(model)[WEIGHTS])
            check_fits(model, _described(path), path)
        state = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", fix="Correct the path.") from None
    except (
        SafetensorError,
        OSError,
        RuntimeError,
        MemoryError,
    ) as error:  # torch raises the last two from mmap
        cause = str(getattr(error, "strerror", None) or error)[:_MAX_NAME]
        raise CheckpointError(
            f"{path} can't be read as safetensors",
            cause=cause,
            fix="Copy or download the file again.",
        ) from None
    check_names(state, path)
    return state


def file_limits(model: nn.Module) -> dict[str, int]:
    """Return the maximum size in bytes of each file of a checkpoint of this model.

    Another user's file can be sparse: terabytes that occupy no disk space. Hashing it would take hours.

    Returns:
        Limits by file name. Values are counted as float64. The optimizer's file has up to four values per weight: a
        moving average, and up to three of the optimizer.
    """
    values = 8 * sum(tensor.numel() for tensor in model.state_dict().values())
    return {WEIGHTS: values + MAX_HEADER_BYTES, OPTIMIZER: 4 * values + MAX_HEADER_BYTES}


def _described(path: Path) -> dict[str, Tensor]:
    """Read the file's tensors on the meta device: shapes without values."""
    with safe_open(path, "pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        check_names(parts, path)
        return {
            name: torch.empty(
                part.get_shape(), dtype=dtype_of(part.get_dtype(), path), device="meta"
            )
            for name, part in parts.items()
        }


def check_names(names: Iterable[str], origin: Path) -> None:
    """Refuse names that are too long to print and compare."""
    for name in names:
        if len(name) > _MAX_NAME:
            raise CheckpointError(
                f"{origin} has a tensor whose name has {len(name):,} characters",
                allowed=f"at most {_MAX_NAME}",
                cause="It is not a file of weights.",
                fix="Give a file of weights.",
            )


def check_kinds(state: Mapping[str, Tensor], origin: Path) -> None:
    """Check that tensors of any shape, read from `origin`, hold numbers that can be copied into a model."""
    for name, tensor in state.items():
        if tensor.layout != torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
        elif tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            kind = (
                "quantized"
                if tensor.is_quantized
                else "without values (meta)"
                if tensor.is_meta
                else "nested"
            )
        elif tensor.dtype not in _COPIED:
            kind = str(tensor.dtype).removeprefix("torch.")
        else:
            continue
        raise CheckpointError(
            f"the tensor {name} is {kind}, which can't be a model's weights",
            where=origin,
            allowed="dense tensors of real numbers",
            fix="Convert it, and save the weights again.",
        )


def load_into(model: nn.Module, state: Mapping[str, Tensor], origin: Path) -> None:
    """Load all weights of a state_dict, tensors of any shape by name, into a model, or none; `origin`: their file.

    Raises:
        CheckpointError: Names, shapes or dtypes differ; the error names the first few.
    """
    check_fits(model, state, origin)
    model.load_state_dict(dict(state))


def check_fits(model: nn.Module, state: Mapping[str, Tensor], origin: Path) -> None:
    """Check that a state_dict, of tensors of any shape, also on the meta device, belongs to a model."""
    ours = model.state_dict()
    missing = [f"{name} {tuple(ours[name].shape)}" for name in ours if name not in state]
    unknown = [f"{name} {tuple(state[name].shape)}" for name in state if name not in ours]
    other = [
        f"{name}: {tuple(state[name].shape)} in the file, {tuple(ours[name].shape)} in the model"
        for name in ours
        if name in state and state[name].shape != ours[name].shape
    ]
    types = [
        f"{name}: {state[name].dtype} in the file, {own.dtype} in the model"
        for name, own in ours.items()
        if name in state and state[name].dtype != own.dtype
    ]
    if missing or unknown or other or types:
        kinds = {"other shape": other, "other type": types, "missing": missing, "unknown": unknown}
        raise CheckpointError(
            "the checkpoint is of another model",
            given=f"{len(state):,} tensors in the file, {len(ours):,} in the model",
            where=origin,
            cause="\n".join(f"{kind}: {_some(lines)}" for kind, lines in kinds.items() if lines),
            fix="Use the settings that it was trained with, or another run folder.",
        )


def _some(lines: list[str], most: int = 5) -> str:
    rest = [f"… {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(lines[:most] + rest)


# The weights of a run folder, verified before use.


def weights_of(
    run: Path, which: str, model: nn.Module | None = None
) -> tuple[Path, dict[str, Tensor]]:
    """Read a run's weights that fit a model: the final ones ("last"), the best checkpoint's ("best"), or a named one.

    If the run keeps a moving average, its values are returned. Before the end of the run, "last" is the newest
    checkpoint that is whole.

    Returns:
        The file or checkpoint folder, and the tensors by name, of any shape.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged, or the final weights belong to another run.
    """
    folder = run / "checkpoints"
    limits = file_limits(model) if model is not None else None
    if which == "last":
        if os.path.lexists(run / WEIGHTS):
            return run / WEIGHTS, _final(run, model)
        bad = []
        for path, one in newest(folder, limits):
            if not isinstance(one, CheckpointError):
                return path, _of_checkpoint(one, model, path)
            bad.append(one.what)
        raise CheckpointError(
            f"{run} has no weights and no whole checkpoint{' yet' * (not bad)}",
            cause="\n".join(bad),
            fix=f"Run samebits train --run-dir {run} --resume auto.",
        )
    path = _path_of(run, which)
    return path, _of_checkpoint(load_checkpoint(path, limits), model, path)


def identity_of(run: Path, which: str) -> tuple[Path, Mapping[str, Any]]:
    """Read the checkpoint's folder and identity from a run as in `weights_of`; the identity is empty without any."""
    folder = run / "checkpoints"
    paths = (
        [folder / name_of(step) for step in reversed(steps(folder))]
        if which == "last"
        else [_path_of(run, which)]
    )
    for path in paths:
        try:
            return path, run_of(read_state(path))
        except CheckpointError:
            continue  # if this checkpoint was requested, reading its weights reports the error
    return folder, {}


def is_as_recorded(run: Path) -> bool:
    """Return whether a run's final weights and its result are whole and match."""
    try:
        _final(run, None)
    except CheckpointError:
        return False
    return True


def _path_of(run: Path, which: str) -> Path:
    folder = run / "checkpoints"
    if which == "best":
        step = read_json(folder / BEST).get("step")
        if not isinstance(step, int):
            raise CheckpointError(
                f"{folder / BEST} was altered: its step is {step!r}",
                fix="Give a checkpoint by name: step-000100.",
            )
        which = name_of(step)
    if not (folder / which).is_dir():
        names = ["last", "best", *map(name_of, steps(folder))]
        raise CheckpointError(
            f"{run} has no checkpoint {which}",
            allowed=", ".join(names),
            fix="Give one of these names.",
        )
    return folder / which


def _of_checkpoint(found: Checkpoint, model: nn.Module | None, path: Path) -> dict[str, Tensor]:
    """Return the moving average of a checkpoint, or else its weights."""
    state = found.average or found.weights
    if model is not None:
        check_fits(model, state, path)
    return state


def _final(run: Path, model: nn.Module | None) -> dict[str, Tensor]:
    path = run / WEIGHTS
    recorded = RunFolder(run).read_json("result.json").get("weights_sha256")
    state = read(path, model)
    found = weights_sha256(state)
    if found != recorded:
        raise CheckpointError(
            f"{path} does not hold the weights that this run ended with",
            given=f"sha256 {found}",
            allowed=f"sha256 {recorded}, recorded in {run / 'result.json'}",
            cause="The file was damaged, or belongs to another run.",
            fix=f"Run samebits train --run-dir {run} --resume auto, which writes it again from the last checkpoint;\n"
            f"or open the file as it is: {path} --preset {run / 'config.yaml'}",
        )
    return state
