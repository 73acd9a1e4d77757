"""Checkpoints of a sharded model and its optimizer: unsharded tensors, gathered and scattered one at a time."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.parallel.exact_fsdp.replica import ExactShards
from samebits.storage.checkpoint import by_file
from samebits.storage.checkpoint_reader import Opened, Shape
from samebits.storage.tensor_file import header


def gathering(
    shards: ExactShards, optimizer: Optimizer, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Prepare the writing of a checkpoint of unsharded tensors from this rank's, of any shape, by name.

    Returns:
        Meta tensors of the unsharded shapes; and a function that gathers one tensor by name. It is a collective call:
        all ranks call it with the same names in the same order. Only on rank 0 is the result the tensor.
    """
    names = {name: shards.sharded_like(name, tensor, optimizer) for name, tensor in tensors.items()}
    whole = {
        name: torch.empty(shards.whole_shape(owner) if owner else tensors[name].shape, dtype=tensors[name].dtype,
                          device="meta")
        for name, owner in names.items()
    }  # fmt: skip

    def fetch(name: str) -> Tensor:
        owner = names[name]
        gathered = shards.gather(owner, tensors[name]) if owner else tensors[name].detach().cpu()
        return whole[name] if gathered is None else gathered

    return whole, fetch


def order_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors of any shape in the order in which `checkpoint.write` writes them."""
    return [name for part in by_file(tensors).values() for name in header(part)[1]]


def read_parts(
    shards: ExactShards, optimizer: Optimizer, world: World, shapes: Mapping[str, Shape], opened: Opened | None
) -> dict[str, Tensor]:
    """Read this rank's parts of a checkpoint's tensors, the weights into the model's own memory.

    Rank 0 reads and broadcasts. No rank has more than one complete tensor in memory. A collective call.

    Args:
        shapes: Shape and dtype of each tensor of the checkpoint. The weights fit the model.
        opened: The checkpoint on rank 0, None on the others.

    Returns:
        This rank's tensors by name: parts (rows, ...) of what is sharded, and the rest in the shapes of the checkpoint.
    """
    state, device, parts = shards.state(), world.device, {}
    for name, (shape, dtype) in shapes.items():
        whole = opened.tensor(name).to(device) if opened is not None else torch.empty(shape, dtype=dtype, device=device)
        collectives.broadcast_tensors(world, [whole])
        owner = shards.sharded_like(name, whole, optimizer)
        part = shards.part(owner, whole) if owner else whole
        # A copy, since a part is a view and would keep the memory of the whole tensor.
        parts[name] = state[name].copy_(part) if name in state else part.clone()
    return parts
