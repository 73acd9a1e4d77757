"""How a rank holds the model: a whole copy (`parallel=ddp`) or shards of it (`parallel=fsdp`).

The engine works on a `Replica` and rarely needs to know which one it has.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.malloc import keep_freed_memory
from samebits.parallel.exact_fsdp.replica import ExactShards
from samebits.parallel.recheck import RecheckedReducer
from samebits.parallel.recoverable import RecoverableReducer
from samebits.parallel.reduce import Reducer


class WholeReplica:
    """A whole copy of the model on each rank. On a CPU the process keeps the memory that a step frees (`malloc.py`).

    Attributes:
        is_sharded: Whether the ranks have to pass through the model together, since none of them has all of it.
        trained: The module whose parameters the optimizer updates.
    """

    is_sharded = False

    def __init__(self, model: nn.Module, world: World) -> None:
        self.trained, self._world = model, world
        if world.device.type == "cpu":
            keep_freed_memory()

    def make_reducer(self, order: Order, *, exact: bool, num_extras: int, synchronized: bool, compress: str) -> Reducer:
        """Create the object that sums a step over the world; called by all ranks together."""
        if order.recheck:
            return RecheckedReducer(self.trained, self._world, order, num_extras=num_extras, compress=compress)
        kind = RecoverableReducer if self._world.membership is not None else Reducer
        return kind(
            self.trained, self._world, exact=exact, num_extras=num_extras, synchronized=synchronized, compress=compress
        )

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
