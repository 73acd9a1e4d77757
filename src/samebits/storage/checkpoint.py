"""Checkpoints: written beside the target, flushed, renamed, pruned; verified before use.

A checkpoint is a folder `step-000230` that holds the weights, the optimizer's tensors, all other state as JSON, and a
manifest with the size and SHA-256 of each file. None of these formats can run code.

The commit protocol:

    write    .step-000230.PID.partial/weights.safetensors, optimizer.safetensors, state.json    fsync of each file
             .step-000230.PID.partial/manifest.json     last, since it holds their hashes; fsync
    flush    .step-000230.PID.partial/                  fsync of the folder: the files' names are on disk
    rename   step-000230 -> .step-000230.PID.partial-old    only if this step was saved before
             .step-000230.PID.partial -> step-000230    atomic: this is the commit
             checkpoints/                               fsync of the folder: the rename is on disk
    return   files of the user's in the old folder go back into the new one, under the paths that they had
    prune    .step-000230.PID.partial-old, then checkpoints beyond `keep`: renamed away, then deleted

A crash or power cut at any point leaves each earlier checkpoint whole, and a folder under a final name is complete. If
a disk fault or a user altered it, it does not match its manifest, and a resume falls back to the checkpoint before it.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from samebits.errors import CheckpointError, cannot_write
from samebits.scratch import remove_named
from samebits.storage.manifest import (
    FILES,
    FORMAT,
    MANIFEST,
    MAX_STATE_BYTES,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    manifest_of,
    parse_object,
    run_of,
    sha256_of,
    verified,
)
from samebits.storage.run_folder import (
    give_back,
    is_checkpoint,
    is_foreign,
    sync_folder,
    take_name,
    write_atomically,
    write_synced,
)
from samebits.storage.tensor_file import write_tensors
from samebits.version import __version__

_PARTIAL = re.compile(r"\.(step-\d+)\.\d+\.partial(-old)?")
BEST = "best.json"
# Module names cannot contain a colon, so these prefixes never collide with the name of a weight.
OPTIMIZER_STATE = "optimizer:"
AVERAGE = "average:"


@dataclass
class Checkpoint:
    """The complete state of a run at one step."""

    step: int  #: Number of optimizer steps done. Sample order, random keys and learning rate follow from it.
    weights: dict[str, Tensor]  #: The model's state_dict.
    optimizer: dict[str, Any]  #: The optimizer's state_dict.
    state: dict[str, Any] = field(default_factory=dict)  #: All other state, as plain JSON.
    #: The exponential moving average of the weights; empty without one.
    average: dict[str, Tensor] = field(default_factory=dict)
    #: The run's identity, compared at a resume; see `run_identity`.
    run: dict[str, Any] = field(default_factory=dict)


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint folder."""
    return f"step-{step:06}"  # padded for listings only: `steps` sorts by number


def save(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint into a run's checkpoint folder, and return its own folder.

    Raises:
        CheckpointError: It cannot be written. All earlier checkpoints are unchanged.
    """
    return write(checkpoint.step, *pack(checkpoint), folder)


def write(
    step: int,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    folder: Path,
    moved: Callable[[int], object] = lambda _: None,
) -> Path:
    """Write a packed checkpoint and return its folder; see the protocol at the top of this module.

    Args:
        tensors, plain: Tensors by name, of any shape, on any device, and all other state, as plain JSON.
        moved: Called with the number of bytes after each write.

    Raises:
        CheckpointError: It cannot be written. All earlier checkpoints are unchanged.
    """
    target = folder / name_of(step)
    # The dot hides it from `steps`. The process id keeps it apart from what other, killed processes left.
    partial = folder / f".{target.name}.{os.getpid()}.partial"
    parts: dict[str, dict[str, Tensor]] = {WEIGHTS: {}, OPTIMIZER: {}}
    for name, tensor in tensors.items():
        file = OPTIMIZER if name.startswith((OPTIMIZER_STATE, AVERAGE)) else WEIGHTS
        parts[file][name] = tensor.detach().cpu()
    try:
        remove_named(partial, FILES)  # left by a killed process that had the same id
        partial.mkdir(parents=True)
        written = {name: write_tensors(partial / name, part, moved) for name, part in parts.items()}
        written[STATE] = _write(partial / STATE, json.dumps(plain, indent=1).encode())
        files = {
            name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in written.items()
        }
        _write(
            partial / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
        )
        # Without this flush, a power cut after the rename could leave a committed folder that lacks files.
        sync_folder(partial)
        # A rename cannot replace a folder that is not empty, so the old one gives up its name first. A crash between
        # the two renames loses this step's checkpoint only; the ones before it remain.
        old = take_name(target)
        partial.rename(target)  # the commit
        sync_folder(folder)
        # only after the commit; `clean` does the same for what a crash here leaves
        give_back(old, target)
    except OSError as error:
        remove_named(partial, FILES)
        raise cannot_write(target, error) from None
    return target


def clean(folder: Path) -> None:
    """Remove partial checkpoints of killed processes. Only for the process that holds the run folder's lock."""
    for partial in folder.glob(".step-*.partial*"):
        if (match := _PARTIAL.fullmatch(partial.name)) is not None:
            give_back(partial, folder / match[1])


def steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, in ascending order."""
    # A user's own folder, such as step-000230-copy or one of notes: it is neither read nor pruned.
    numbers = (
        path.name.removeprefix("step-") for path in folder.glob("step-*") if is_checkpoint(path)
    )
    return sorted(int(number) for number in numbers)


def prune(folder: Path, step: int, keep: int, is_kept: Callable[[int], bool]) -> None:
    """Remove all but the newest `keep` checkpoints up to a step, and those that are kept for another reason.

    Args:
        step: The step that was just saved. Later checkpoints are kept and not counted: the run was resumed from before
            them, perhaps because they are damaged.
        is_kept: Whether the checkpoint of a step is kept anyway, such as the best one.
    """
    own = [
        number
        for number in steps(folder)
        if number <= step and not is_foreign(folder / name_of(number), number)
    ]
    for older in own[:-keep]:
        if not is_kept(older):
            # Renamed first, so that a crash never leaves a partly deleted one under its name.
            remove_named(take_name(folder / name_of(older)), FILES)


def load_checkpoint(path: Path, limits: Mapping[str, int] | None = None) -> Checkpoint:
    """Read and verify a checkpoint; `limits` are sizes in bytes by file name (`file_limits`). Tensors are on the CPU.

    Raises:
        CheckpointError: A file is missing, truncated, altered or too large.
    """
    limits = {STATE: MAX_STATE_BYTES, **(limits or {})}
    # Parsed below from the bytes that were hashed: the files cannot change between the check and the use.
    contents = {
        name: verified(path / name, expected, limits.get(name))
        for name, expected in manifest_of(path).items()
    }
    try:
        tensors = load(contents[WEIGHTS]) | load(contents[OPTIMIZER])
    except (SafetensorError, MemoryError) as error:
        raise CheckpointError(
            f"{path} can't be read as safetensors",
            cause=error,
            fix="Resume from an earlier checkpoint.",
        ) from None
    return unpack(tensors, parse_object(path / STATE, contents[STATE]), path)


def newest(
    folder: Path,
    limits: Mapping[str, int] | None = None,
) -> Iterator[tuple[Path, Checkpoint | CheckpointError]]:
    """Yield the checkpoints of a run, newest first, each one as `load_checkpoint` reads it or as its error."""
    for step in reversed(steps(folder)):
        path = folder / name_of(step)
        try:
            yield path, load_checkpoint(path, limits)
        except CheckpointError as error:
            yield path, error


def load_newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, or None; for custom training loops."""
    return next((found for _, found in newest(folder) if isinstance(found, Checkpoint)), None)


def mark_best(folder: Path, best: dict[str, Any]) -> None:
    """Record the best checkpoint: `{"step": …, "metric": …, "value": …, "better": "max" or "min"}`."""
    write_atomically(folder / BEST, json.dumps(best).encode())


def pack(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a checkpoint into tensors of any shape, by name, and plain JSON."""
    tensors = checkpoint.weights | {
        f"{AVERAGE}{name}": tensor for name, tensor in checkpoint.average.items()
    }
    values: dict[str, Any] = {}
    for index, entries in checkpoint.optimizer["state"].items():
        for key, value in entries.items():
            name = f"{OPTIMIZER_STATE}{index}:{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                values[name] = value
    groups = checkpoint.optimizer["param_groups"]
    plain = {
        "step": checkpoint.step,
        "state": checkpoint.state,
        "run": checkpoint.run,
        "groups": groups,
    }
    return tensors, {**plain, "values": values}


def unpack(
    tensors: dict[str, Tensor], plain: dict[str, Any], path: Path | None = None
) -> Checkpoint:
    """Join what `pack` split: tensors of any shape, by name, and the other state as plain JSON.

    Raises:
        CheckpointError: `plain` does not have the form that `pack` returns.
    """
    weights = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith((OPTIMIZER_STATE, AVERAGE))
    }
    average = {
        name.removeprefix(AVERAGE): tensor
        for name, tensor in tensors.items()
        if name.startswith(AVERAGE)
    }
    entries: dict[int, dict[str, Any]] = {}
    try:
        for name, value in {**tensors, **plain["values"]}.items():
            if name.startswith(OPTIMIZER_STATE):
                _, index, key = name.split(":")
                entries.setdefault(int(index), {})[key] = value
        step = plain["step"]
        state = plain["state"]
        groups = plain["groups"]
        if not (isinstance(step, int) and isinstance(state, dict) and isinstance(groups, list)):
            raise TypeError("step, state or groups is of another type")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        # No damage, since the hashes match by now: JSON of another form.
        raise CheckpointError(
            f"{path / STATE if path else STATE} does not have the form of a checkpoint",
            cause=f"It was written by another version of Samebits: {type(error).__name__}: {error}",
            fix=f"Resume with the version that wrote it; this is {__version__}.",
        ) from None

    optimizer = {"state": entries, "param_groups": groups}
    return Checkpoint(step, weights, optimizer, state, average, run_of(plain))


def _write(path: Path, content: bytes) -> tuple[int, str]:
    write_synced(path, content)
    return len(content), sha256_of(content)
