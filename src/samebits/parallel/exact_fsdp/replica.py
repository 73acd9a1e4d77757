"""Sharded training (`parallel=fsdp`): weights, gradients and optimizer state by whole tensors.

As torch's fully_shard, a rank gathers the parameters of a block for its forward and backward pass and frees them
afterwards. But one rank owns a tensor as a whole, so the optimizer updates it with the bits of an unsharded model; and
gradients are added in the binary tree over micro-batches, so their bits do not depend on the number of ranks.

Micro-batches are dealt out in turn (`division.IN_TURN`), so the ranks run neighboring leaves of the tree at the same
time, and an owner adds them as they come. It keeps about log2(micro-batches) sums of its own tensors, and no others.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.errors import ConfigError
from samebits.malloc import return_freed_memory
from samebits.parallel.blocks import shard_blocks
from samebits.parallel.exact_fsdp.gathering import GatheredUnits
from samebits.parallel.exact_fsdp.reducer import ExactShardedReducer
from samebits.parallel.exact_fsdp.unit import ShardUnit, assign_owners
from samebits.parallel.exchange.part import Message
from samebits.parallel.exchange.tree_all_reduce import post, wait_all


class ExactShards:
    """This rank's state of a sharded model: the parameters that it owns, and all buffers.

    Making it is a collective call that shards the model in place, with rank 0's values. A part of a parameter is the
    whole tensor on its owner and has no rows on the other ranks. The model comes complete, on the world's device, its
    parameters dense.

    Attributes:
        parameters: This rank's part of each parameter by name, in the model's order, for the optimizer: plain tensors
            that share their memory with the model's, (rows, ...).
        trained: The same as a module.

    Raises:
        ConfigError: The model cannot be sharded.
    """

    is_sharded = True

    def __init__(self, model: nn.Module, world: World) -> None:
        self.module, self._world = model, world
        prepare_sharding(model, world)
        collectives.broadcast_tensors(world, [*model.buffers()])
        named = dict(model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        owners = dict(zip(named, assign_owners([each.numel() for each in named.values()], world.size), strict=True))
        self._owners = owners
        by_parameter = {parameter: owners[name] for name, parameter in named.items()}
        blocks = [module for _, module in shard_blocks(model)]
        inside = {parameter for block in blocks for parameter in block.parameters()}
        groups = [list(block.parameters()) for block in blocks]
        if outside := [parameter for parameter in named.values() if parameter not in inside]:
            groups.append(outside)
        units: list[ShardUnit] = []
        for number, group in enumerate(groups):
            collectives.broadcast_tensors(world, group)
            units.append(ShardUnit(number, group, [by_parameter[each] for each in group], world))
            units[-1].free()
        self.parameters = {
            name: nn.Parameter(
                each.detach() if owners[name] == world.rank else each.new_empty((0, *each.shape[1:])),
                requires_grad=each.requires_grad,
            )
            for name, each in named.items()
        }
        self.trained: nn.Module = nn.ParameterList(self.parameters.values())
        self._gathered = GatheredUnits(model, blocks, units)

    def make_reducer(
        self, order: Order, *, exact: bool, num_extras: int, synchronized: bool, compress: str
    ) -> ExactShardedReducer:
        """See `WholeReplica.make_reducer`. Settings other than `num_extras` do not apply to a sharded model."""
        trained = [(each, self.parameters[name]) for name, each in self.module.named_parameters() if each.requires_grad]
        owners = {each: self._owners[name] for name, each in self.module.named_parameters()}
        places = [owners[each] for each, _ in trained]
        return ExactShardedReducer(self.module, self._gathered, trained, places, self._world, num_extras)

    def whole_shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter in the unsharded model."""
        return self._shapes[name]

    def gather(self, name: str, part: Tensor) -> Tensor | None:
        """Gather a part, (rows, ...), of a parameter or a state, on rank 0's host; None on others.

        Called on all ranks. The owner sends the tensor to rank 0.
        """
        world, owner = self._world, self._owners[name]
        if world.rank not in (0, owner):
            return None
        if owner == 0:
            return part.detach().cpu()
        values = part.detach().contiguous() if world.rank == owner else part.new_empty(self.whole_shape(name))
        with world.activity.waiting("gathering sharded weights"):
            wait_all(post(world, [Message(values, owner if world.is_main else 0, 0, is_receive=world.is_main)]))
        return values.cpu() if world.is_main else None

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a complete tensor, (n, ...): a view with all of its rows or none."""
        return whole if self._owners[name] == self._world.rank else whole[:0]

    def sharded_like(self, name: str, tensor: Tensor, optimizer: Optimizer) -> str | None:
        """Return the parameter that a checkpoint's tensor, of any shape, is sharded like; None if all ranks have it."""
        if not name.startswith("optimizer:"):
            name = name.removeprefix("average:")
            return name if name in self.parameters else None
        if tensor.dim() == 0:
            return None  # such as Adam's step count
        index = int(name.split(":")[1])
        parts = [part for group in optimizer.param_groups for part in group["params"]]
        return next(other for other, part in self.parameters.items() if part is parts[index])

    def comparable(self, tensors: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
        """See `WholeReplica.comparable`. Returns the tensors that all ranks have whole: shards differ by design."""
        return {name: tensor for name, tensor in tensors.items() if self.sharded_like(name, tensor, optimizer) is None}

    def state(self) -> dict[str, Tensor]:
        """See `WholeReplica.state`. Returns this rank's parts of the parameters, in the model's own memory."""
        state: dict[str, Tensor] = self.module.state_dict()
        return {name: self.parameters[name].detach() if name in self.parameters else state[name] for name in state}

    def gather_all(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `WholeReplica.gather_all`. Gathers in rank 0's host memory; returns an empty dict on the other ranks."""
        whole = {}
        for name, tensor in state.items():
            gathered = self.gather(name, tensor) if name in self.parameters else tensor.detach().cpu()
            if gathered is not None and self._world.is_main:
                whole[name] = gathered
        return whole

    # Parameters can be changed in place only without autograd.
    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor] | None) -> None:
        """See `WholeReplica.load`. Only one tensor at a time is whole on the device."""
        for name, here in self.state().items():
            sharded = name in self.parameters
            shape = self.whole_shape(name) if sharded else here.shape
            whole = state[name].to(here.device, here.dtype) if state is not None else here.new_empty(shape)
            collectives.broadcast_tensors(self._world, [whole])
            here.copy_(self.part(name, whole) if sharded else whole)


def prepare_sharding(model: nn.Module, world: World) -> None:
    """Check that a model can be sharded, and prepare the process for memory that is freed and taken again.

    Raises:
        ConfigError: The model cannot be sharded.
    """
    _check(model, world)
    if world.device.type == "cpu":
        return_freed_memory()
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # On a GPU it would move gathered weights into cuDNN's own memory, where the next gather does not write.
            module.flatten_parameters = lambda: None  # type: ignore[method-assign]  # on this object only


def _check(model: nn.Module, world: World) -> None:
    if world.device.type == "cuda" and world.backend != "nccl":
        raise ConfigError(
            f"parallel=fsdp on GPUs needs the backend nccl, not {world.backend}",
            fix="Start one process for each GPU, or set parallel=ddp.",
        )
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        problem = None
        if parameter.dim() == 0:
            problem = f"{name} is a single number"
        elif parameter.dtype != torch.float32:
            problem = f"{name} is {parameter.dtype}"
        elif seen.setdefault(id(parameter), name) != name:
            problem = f"{name} is the same parameter as {seen[id(parameter)]}"
        if problem is not None:
            raise ConfigError(f"parallel=fsdp cannot shard this model: {problem}", fix="Set parallel=ddp.")
