"""The state of a sharded model and its optimizer as whole tensors, gathered and distributed one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.cluster import collectives
from lockstep.cluster.world import World
from lockstep.storage.checkpoint import by_file
from lockstep.storage.checkpoint_reader import Opened, Shape
from lockstep.storage.tensor_file import header

if TYPE_CHECKING:
    from lockstep.parallel.sharded import Shards  # at run time only by name: torch's FSDP takes a second to import


def sharded_name(name: str, tensor: Tensor, shards: Shards, optimizer: Optimizer) -> str | None:
    """The parameter that a checkpoint's tensor is sharded like; None where all ranks have all of it.

    Args:
        name: In a checkpoint, as `checkpoint.pack` has it.
        tensor: The tensor, whole or a rank's part.
        shards: The sharded model.
        optimizer: Its optimizer.
    """
    if not name.startswith("optimizer:"):
        name = name.removeprefix("average:")
        return name if name in shards.parameters else None
    if tensor.dim() == 0:
        return None  # such as adam's count of steps
    place = int(name.split(":")[1])
    parts = [part for group in optimizer.param_groups for part in group["params"]]
    return next(known for known, part in shards.parameters.items() if part is parts[place])


def gathering(
    shards: Shards, optimizer: Optimizer, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """What stands for a rank's parts when a checkpoint of whole tensors is written.

    Args:
        shards: The sharded model.
        optimizer: Its optimizer.
        tensors: This rank's, by name, as `checkpoint.pack` has them.

    Returns:
        Meta tensors of the whole shapes; and what gives a whole tensor by its name, on rank 0's host. All ranks have to
        ask for the same ones in the same order; on the others what it gives is of no use.
    """
    names = {name: sharded_name(name, tensor, shards, optimizer) for name, tensor in tensors.items()}
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


def read_parts(
    shards: Shards, optimizer: Optimizer, world: World, shapes: Mapping[str, Shape], opened: Opened | None
) -> dict[str, Tensor]:
    """This rank's parts of a checkpoint's tensors, the weights in the model's own memory.

    Rank 0 reads; no rank ever has more than one tensor whole.

    Args:
        shards: The sharded model.
        optimizer: Its optimizer.
        world: The processes of the run.
        shapes: Shape and type of each tensor of the checkpoint; the weights fit the model.
        opened: The checkpoint, on rank 0.
    """
    state, device, parts = shards.state(), world.device, {}
    for name, (shape, dtype) in shapes.items():
        whole = opened.tensor(name).to(device) if opened is not None else torch.empty(shape, dtype=dtype, device=device)
        collectives.broadcast_tensors(world, [whole])
        part = shards.part(whole) if sharded_name(name, whole, shards, optimizer) else whole
        parts[name] = state[name].copy_(part) if name in state else part.clone()
    return parts
