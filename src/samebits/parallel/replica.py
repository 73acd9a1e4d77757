"""How a rank holds the model: a whole copy (`parallel=ddp`) or shards of it (`parallel=fsdp`).

The engine works on a `Replica` and rarely needs to know which one it has.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.host_memory import keep_freed_memory
from samebits.parallel.exact_fsdp.replica import ExactShards
from samebits.parallel.recoverable import RecoverableReducer
from samebits.parallel.reduce import Reducer
from samebits.storage.checkpoint import OpenedCheckpoint, Shape, by_file
from samebits.storage.tensor_file import header


class WholeReplica:
    """A whole copy of the model on each rank. On a CPU the process keeps memory that a step frees (`host_memory.py`).

    Attributes:
        is_sharded: Whether the ranks have to pass through the model together, since none of them has all of it.
        trained: The module whose parameters the optimizer updates.
    """

    is_sharded = False

    def __init__(self, model: nn.Module, world: World) -> None:
        self.trained = model
        self._world = world
        if world.device.type == "cpu":
            keep_freed_memory()

    def make_reducer(self, *, num_extras: int, synchronized: bool) -> Reducer:
        """Create the object that sums a step over the world; called by all ranks together."""
        kind = RecoverableReducer if self._world.membership is not None else Reducer
        return kind(self.trained, self._world, num_extras=num_extras, synchronized=synchronized)

    def state(self) -> Mapping[str, Tensor]:
        """Return the model's state_dict without copies, in the shapes of the model's own tensors.

        If sharded, each parameter is this rank's part of it, (rows, ...).
        """
        state: Mapping[str, Tensor] = self.trained.state_dict()
        return state

    def gather_all(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a state, the weights or their average, with whole tensors, on rank 0; called by all ranks together.

        Returns:
            The tensors by name, in the shapes of the unsharded model: here the state itself, whole on every rank.
        """
        return state

    # Parameters can be changed in place only without autograd.
    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor] | None) -> None:
        """Load a state_dict, in the shapes of the unsharded model, from rank 0 on all ranks; None on the others."""
        mine = self.state()
        for name, tensor in (state or {}).items():
            if mine[name].data_ptr() != tensor.data_ptr():  # rank 0 may pass the model's own state
                mine[name].copy_(tensor)
        collectives.broadcast_tensors(self._world, list(mine.values()))

    def comparable(self, tensors: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
        """Return those tensors of a checkpoint, of any shape, that must be equal on all ranks, by name: here all."""
        return dict(tensors)


Replica = WholeReplica | ExactShards  # a rank's share of the model's state


# Checkpoints of a sharded model and its optimizer: unsharded tensors, gathered and scattered one at a time.


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
    shards: ExactShards,
    optimizer: Optimizer,
    world: World,
    shapes: Mapping[str, Shape],
    opened: OpenedCheckpoint | None,
) -> dict[str, Tensor]:
    """Read this rank's parts of a checkpoint's tensors, the weights into the model's own memory.

    Rank 0 reads and broadcasts. No rank has more than one complete tensor in memory. A collective call.

    Args:
        shapes: Shape and dtype of each tensor of the checkpoint. The weights fit the model.
        opened: The checkpoint on rank 0, None on the others.

    Returns:
        This rank's tensors by name: parts (rows, ...) of what is sharded, and the rest in the shapes of the checkpoint.
    """
    state = shards.state()
    device = world.device
    parts = {}
    for name, (shape, dtype) in shapes.items():
        whole = (
            opened.tensor(name).to(device)
            if opened is not None
            else torch.empty(shape, dtype=dtype, device=device)
        )
        collectives.broadcast_tensors(world, [whole])
        owner = shards.sharded_like(name, whole, optimizer)
        part = shards.part(owner, whole) if owner else whole
        # A copy, since a part is a view and would keep the memory of the whole tensor.
        parts[name] = state[name].copy_(part) if name in state else part.clone()
    return parts
