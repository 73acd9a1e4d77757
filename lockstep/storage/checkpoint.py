"""Checkpoints: written beside, flushed to disk, renamed; verified before they are used.

A checkpoint is a folder `step-000230` with the weights, the optimizer's tensors, what else there is as JSON, and a
manifest with the size and SHA-256 of each. Nothing in it can run code. The folder gets its name when all of it is on
disk, so a name that is there is a whole checkpoint, unless the disk or a person altered it: that the manifest finds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from lockstep.errors import CheckpointError, cannot_write
from lockstep.scratch import remove_named
from lockstep.storage.manifest import (
    FORMAT,
    MANIFEST,
    MAX_STATE_BYTES,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    manifest_of,
    parse_object,
    sha256_of,
    verified,
)
from lockstep.storage.run_folder import sync_folder, write_atomically
from lockstep.storage.tensor_file import write_tensors
from lockstep.version import __version__

FILES = (MANIFEST, STATE, OPTIMIZER, WEIGHTS)
BEST = "best.json"
# No module has a colon in its name, so an optimizer's tensors never collide with weights.
T = TypeVar("T")
_OPTIMIZER, AVERAGE = "optimizer:", "average:"


@dataclass
class Checkpoint:
    """All that a run needs to go on.

    Attributes:
        step: Optimizer steps done: the position, from which order, keys and learning rate follow.
        weights: The model's state_dict.
        optimizer: The optimizer's state_dict.
        state: Everything else, as plain JSON.
        average: The moving average of the weights, where there is one.
        run: What decides the run's bits, to be compared at a resume; see `run_identity`.
    """

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


def name_of(step: int) -> str:
    """The name of a step's checkpoint folder."""
    return f"step-{step:06}"


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint into a run's checkpoint folder.

    Returns:
        Its own folder.

    Raises:
        CheckpointError: It can't be written; all earlier ones are as they were.
    """
    return write(checkpoint.step, *pack(checkpoint), folder)


def write(
    step: int,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    folder: Path,
    moved: Callable[[int], object] = lambda _: None,
    fetch: Callable[[str], Tensor] | None = None,
) -> Path:
    """`save` for a checkpoint that was packed.

    Args:
        step: Its step.
        tensors: By name, on any device.
        plain: What else there is, as plain JSON.
        folder: The run's checkpoint folder.
        moved: Told now and then how many bytes have gone to the disk.
        fetch: Gives each tensor when it is its turn; those in `tensors` are then on the
            meta device.
    """
    target = folder / name_of(step)
    partial = folder / f".{target.name}.{os.getpid()}.partial"
    parts = by_file(tensors if fetch else {name: tensor.detach().cpu() for name, tensor in tensors.items()})
    try:
        remove_named(partial, FILES)  # there seldom is one
        partial.mkdir(parents=True)
        written = {name: write_tensors(partial / name, part, moved, fetch) for name, part in parts.items()}
        written[STATE] = _write(partial / STATE, json.dumps(plain, indent=1).encode())
        files = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in written.items()}
        _write(partial / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1).encode())
        sync_folder(partial)
        old = _take_name(target)
        partial.rename(target)
        sync_folder(folder)
        remove_named(old, FILES)  # the new one is whole; `clean` takes the rest
    except OSError as error:
        remove_named(partial, FILES)  # `clean` takes the rest
        raise cannot_write(target, error) from None
    return target


def file_of(name: str) -> str:
    """The file that a tensor is in, by its name."""
    return OPTIMIZER if name.startswith((_OPTIMIZER, AVERAGE)) else WEIGHTS


def by_file(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by the file that they go to."""
    parts: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    for name, tensor in tensors.items():
        parts[file_of(name)][name] = tensor
    return parts


def discard(target: Path) -> None:
    """Remove a checkpoint; it loses its name before its files."""
    remove_named(_take_name(target), FILES)  # the next run tries again


def clean(folder: Path) -> None:
    """Remove what a killed process left half-written. Only for the process that has the run folder."""
    for partial in folder.glob(".step-*.partial*"):
        remove_named(partial, FILES)


def steps(folder: Path) -> list[int]:
    """The steps of which there are checkpoints, oldest first."""
    numbers = (path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(number) for number in numbers if number.isdecimal())


def prune(folder: Path, step: int, keep: int, best: int | None) -> None:
    """Remove what is older than the newest `keep` up to a step, but for the best one.

    Later ones are left alone and don't count: the run has gone back behind them, as they are torn, say.
    """
    for older in [number for number in steps(folder) if number <= step][:-keep]:
        if older != best:
            discard(folder / name_of(older))


def load_checkpoint(path: Path, limits: Mapping[str, int] | None = None) -> Checkpoint:
    """Read and verify a checkpoint. Tensors are on the CPU.

    Args:
        path: Its folder.
        limits: How many bytes each file may have; see `weights.file_limits`. None: as many as there are.

    Raises:
        CheckpointError: A file is missing, torn or altered, or too large.
    """
    limits = {STATE: MAX_STATE_BYTES, **(limits or {})}
    contents = {name: verified(path / name, expected, limits.get(name)) for name, expected in manifest_of(path).items()}
    try:
        tensors = load(contents[WEIGHTS]) | load(contents[OPTIMIZER])
    except (SafetensorError, MemoryError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors", reason=error) from None
    return unpack(tensors, parse_object(path / STATE, contents[STATE]), path)


def newest(
    folder: Path,
    load: Callable[[Path], T] = load_checkpoint,  # type: ignore[assignment]  # T is Checkpoint where nothing is given
) -> Iterator[tuple[Path, T | CheckpointError]]:
    """The checkpoints of a run, newest first, each loaded or with what is wrong with it."""
    for step in reversed(steps(folder)):
        path = folder / name_of(step)
        try:
            yield path, load(path)
        except CheckpointError as error:
            yield path, error


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a folder, or None where there is none (yet); for a loop of one's own."""
    return next((found for _, found in newest(folder) if isinstance(found, Checkpoint)), None)


def mark_best(folder: Path, best: dict[str, Any]) -> None:
    """Remember which checkpoint is the best one: `{"step": …, "metric": …, "value": …}`."""
    write_atomically(folder / BEST, json.dumps(best).encode())


def pack(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Part a checkpoint into tensors, by name, and plain JSON."""
    tensors = checkpoint.weights | {f"{AVERAGE}{name}": tensor for name, tensor in checkpoint.average.items()}
    values: dict[str, Any] = {}
    for place, entries in checkpoint.optimizer["state"].items():
        for key, value in entries.items():
            name = f"{_OPTIMIZER}{place}:{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                values[name] = value
    groups = checkpoint.optimizer["param_groups"]
    plain = {"step": checkpoint.step, "state": checkpoint.state, "run": checkpoint.run, "groups": groups}
    return tensors, {**plain, "values": values}


def unpack(tensors: dict[str, Tensor], plain: dict[str, Any], path: Path | None = None) -> Checkpoint:
    """The inverse of `pack`.

    Raises:
        CheckpointError: `plain`, which was read from `path`, does not have the form that `pack` gives it.
    """
    try:
        return _unpack(tensors, plain)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / STATE if path else STATE} does not have the form of a checkpoint",
            problem=f"{type(error).__name__}: {error}",
            cause="another version of Lockstep wrote it",
            fix=f"resume with the version that wrote it; this is {__version__}",
        ) from None


def _unpack(tensors: dict[str, Tensor], plain: dict[str, Any]) -> Checkpoint:
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith((_OPTIMIZER, AVERAGE))}
    average = {name.removeprefix(AVERAGE): tensor for name, tensor in tensors.items() if name.startswith(AVERAGE)}
    entries: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **plain["values"]}.items():
        if name.startswith(_OPTIMIZER):
            _, place, key = name.split(":")
            entries.setdefault(int(place), {})[key] = value
    optimizer = {"state": entries, "param_groups": plain["groups"]}
    if not (isinstance(plain["step"], int) and isinstance(plain["state"], dict) and isinstance(plain["groups"], list)):
        raise TypeError("step, state or groups is of another type")
    return Checkpoint(plain["step"], weights, optimizer, plain["state"], average, run_of(plain))


def run_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's state keeps of the run's identity; empty in checkpoints from before it was kept."""
    run = plain.get("run")
    return run if isinstance(run, dict) else {}


def _write(path: Path, content: bytes) -> tuple[int, str]:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content), sha256_of(content)


def _take_name(target: Path) -> Path:
    """Give a checkpoint a name under which nobody looks for it; the name, whether or not there was a checkpoint."""
    nameless = target.with_name(f".{target.name}.{os.getpid()}.partial-old")
    if target.exists():
        target.rename(nameless)
    return nameless
