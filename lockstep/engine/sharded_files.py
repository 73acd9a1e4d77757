"""A sharded model's checkpoints: the same files as any other's, written and read one whole tensor at a time."""

from __future__ import annotations

import errno
import hashlib
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.cluster import collect
from lockstep.engine.checkpoint import by_file, file_of
from lockstep.engine.job import Job
from lockstep.engine.manifest import OPTIMIZER, WEIGHTS, check_file, manifest_of, read_state
from lockstep.engine.tensor_file import check_header, dtype_of, header
from lockstep.errors import CheckpointError

Shape = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Opened:
    """A verified checkpoint of which nothing but names and shapes is in memory.

    Attributes:
        plain: What else there is, as `pack` has it.
        shapes: Shape and type of each tensor, by name.
    """

    path: Path
    plain: dict[str, Any]
    shapes: dict[str, Shape]

    def tensor(self, name: str) -> Tensor:
        """A tensor, read now."""
        file = file_of(name)
        with safe_open(self.path / file, "pt") as opened:
            found: Tensor = opened.get_tensor(name)
        return found


def open_checkpoint(path: Path) -> Opened:
    """Verify a checkpoint, a piece at a time; see `load_checkpoint`.

    Raises:
        CheckpointError: A file is missing, torn or altered.
    """
    for name, expected in manifest_of(path).items():
        try:
            status = (path / name).stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if status.st_size != expected.get("bytes"):  # before time is spent on all of it
                check_file(path / name, expected, status.st_size, "")
            with (path / name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                check_file(path / name, expected, file.tell(), sha256)
        except OSError as error:
            raise CheckpointError(f"{path / name} can't be read: {error.strerror}") from None
    shapes: dict[str, Shape] = {}
    try:
        for file_name in (WEIGHTS, OPTIMIZER):
            check_header(path / file_name)
            with safe_open(path / file_name, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    part = opened.get_slice(name)
                    shapes[name] = torch.Size(part.get_shape()), dtype_of(part.get_dtype(), path / file_name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors", reason=str(error)[:500]) from None
    return Opened(path, read_state(path), shapes)


def sharded_name(name: str, tensor: Tensor, job: Job) -> str | None:
    """The parameter that a checkpoint's tensor is sharded like; None where all ranks have all of it.

    Args:
        name: In a checkpoint, as `checkpoint.pack` has it.
        tensor: The tensor, whole or a rank's part.
        job: A run with a sharded model.
    """
    assert job.shards is not None
    if not name.startswith("optimizer:"):
        name = name.removeprefix("average:")
        return name if name in job.shards.parameters else None
    if tensor.dim() == 0:
        return None  # such as adam's count of steps
    place = int(name.split(":")[1])
    parts = [part for group in job.optimizer.param_groups for part in group["params"]]
    return next(known for known, part in job.shards.parameters.items() if part is parts[place])


def gathering(job: Job, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """What stands for a rank's parts when a checkpoint of whole tensors is written.

    Args:
        job: A run with a sharded model.
        tensors: This rank's, by name, as `checkpoint.pack` has them.

    Returns:
        Meta tensors of the whole shapes; and what gives a whole tensor by its name, on rank 0's host. All ranks have to
        ask for the same ones in the same order; on the others what it gives is of no use.
    """
    assert job.shards is not None
    shards = job.shards
    names = {name: sharded_name(name, tensor, job) for name, tensor in tensors.items()}
    whole = {
        name: torch.empty(shards.whole_shape(owner) if owner else tensors[name].shape, dtype=tensors[name].dtype,
                          device="meta")
        for name, owner in names.items()
    }  # fmt: skip

    def fetch(name: str) -> Tensor:
        owner = names[name]
        found = shards.gather(owner, tensors[name]) if owner else tensors[name].detach().cpu()
        return whole[name] if found is None else found

    return whole, fetch


def order_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """The order in which `checkpoint.write` goes through tensors."""
    return [name for part in by_file(tensors).values() for name in header(part)[1]]


def read_parts(job: Job, shapes: Mapping[str, Shape], opened: Opened | None) -> dict[str, Tensor]:
    """This rank's parts of a checkpoint's tensors, the weights in the model's own memory.

    Rank 0 reads; no rank ever has more than one tensor whole.

    Args:
        job: A run with a sharded model.
        shapes: Shape and type of each tensor of the checkpoint; the weights fit the model.
        opened: The checkpoint, on rank 0.
    """
    assert job.shards is not None
    state, device, parts = job.shards.state(), job.world.device, {}
    for name, (shape, dtype) in shapes.items():
        whole = opened.tensor(name).to(device) if opened is not None else torch.empty(shape, dtype=dtype, device=device)
        collect.broadcast_tensors(job.world, [whole])
        part = job.shards.part(whole) if sharded_name(name, whole, job) else whole
        parts[name] = state[name].copy_(part) if name in state else part.clone()
    return parts
