"""Sharded training in exact mode (`parallel=fsdp mode=exact`): weights, gradients and optimizer state by whole tensors.

As torch's fully_shard, a rank gathers the parameters of a block for its forward and backward pass and frees them
afterwards. But one rank owns a tensor as a whole, so the optimizer updates it with the bits of an unsharded model; and
gradients are added in the binary tree over micro-batches, so their bits do not depend on the number of ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.parallel.blocks import shard_blocks
from samebits.parallel.exact_fsdp.owners import assign_owners
from samebits.parallel.exact_fsdp.reducer import ExactShardedReducer
from samebits.parallel.exact_fsdp.unit import ShardUnit
from samebits.parallel.exchange.part import Message
from samebits.parallel.exchange.tree_all_reduce import post
from samebits.parallel.sharded_replica import ShardedReplica, prepare_sharding


class ExactShards(ShardedReplica):
    """This rank's state of a sharded model: the parameters that it owns, and all buffers.

    Making it is a collective call that shards the model in place, with rank 0's values. A part of a parameter, as in
    `ShardedReplica.state`, is the whole tensor on its owner and has no rows on the other ranks. The model comes
    complete, on the world's device, its parameters dense.

    Attributes:
        units: The blocks in the model's order, then what is outside of all blocks, if anything.
        num_blocks: Number of blocks.

    Raises:
        ConfigError: The model cannot be sharded.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
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
        self.units = []
        for number, group in enumerate(groups):
            collectives.broadcast_tensors(world, group)
            self.units.append(ShardUnit(number, group, [by_parameter[each] for each in group], world))
            self.units[-1].free()
        self.num_blocks, self._is_in_backward = len(blocks), False
        parts = {
            name: nn.Parameter(
                each.detach() if owners[name] == world.rank else each.new_empty((0, *each.shape[1:])),
                requires_grad=each.requires_grad,
            )
            for name, each in named.items()
        }
        super().__init__(model, world, parts)
        for number, block in enumerate(blocks):
            self._add_hooks(number, block)
        model.register_forward_pre_hook(self._begin_forward)
        model.register_forward_hook(self._end_forward)

    def make_reducer(
        self, order: Order, *, exact: bool, num_extras: int, synchronized: bool, compress: str
    ) -> ExactShardedReducer:
        """See `Replica.make_reducer`. Settings other than `num_extras` do not apply to a sharded model."""
        trained = [(each, self.parameters[name]) for name, each in self.module.named_parameters() if each.requires_grad]
        owners = {each: self._owners[name] for name, each in self.module.named_parameters()}
        return ExactShardedReducer(self, trained, [owners[each] for each, _ in trained], self._world, num_extras)

    def whole_shape(self, name: str) -> torch.Size:
        """See `ShardedReplica.whole_shape`."""
        return self._shapes[name]

    def gather(self, name: str, part: Tensor) -> Tensor | None:
        """See `ShardedReplica.gather`. The owner sends the tensor to rank 0."""
        world, owner = self._world, self._owners[name]
        if world.rank not in (0, owner):
            return None
        if owner == 0:
            return part.detach().cpu()
        values = part.detach().contiguous() if world.rank == owner else part.new_empty(self.whole_shape(name))
        with world.activity.waiting("gathering sharded weights"):
            for work in post(world, [Message(values, owner if world.is_main else 0, 0, is_receive=world.is_main)]):
                work.wait()
        return values.cpu() if world.is_main else None

    def part(self, name: str, whole: Tensor) -> Tensor:
        """See `ShardedReplica.part`. Returns all rows or none."""
        return whole if self._owners[name] == self._world.rank else whole[:0]

    def begin_backward(self) -> None:
        """Note that a backward pass begins: blocks whose forward runs again in it stay gathered."""
        self._is_in_backward = True

    def end_pass(self) -> None:
        """Free all that is gathered. Called on all ranks."""
        self._is_in_backward = False
        for unit in self.units:
            unit.free()

    def _add_hooks(self, number: int, block: nn.Module) -> None:
        def gather(neighbor: int) -> None:
            self.units[number].gather()
            if 0 <= neighbor < self.num_blocks:
                self.units[neighbor].start_gather()  # while this block computes

        def before_forward(*_: Any) -> None:
            gather(number - 1 if self._is_in_backward else number + 1)

        def before_backward(_: Tensor) -> None:
            gather(number - 1)

        def after_forward(_: nn.Module, __: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                # Outputs may be nested; torch has no public module for that.
                for each in tree_leaves(output):
                    if isinstance(each, Tensor) and each.requires_grad:
                        each.register_hook(before_backward)
            # The last block stays gathered, since the backward pass begins there.
            is_needed_next = torch.is_grad_enabled() and number + 1 == self.num_blocks
            if not self._is_in_backward and not is_needed_next:
                self.units[number].free()

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)

    def _begin_forward(self, *_: Any) -> None:
        for unit in self.units[self.num_blocks :]:
            unit.gather()

    def _end_forward(self, *_: Any) -> None:
        # No backward pass follows, at whose end everything is freed.
        if not torch.is_grad_enabled():
            self.end_pass()
