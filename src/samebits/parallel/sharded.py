"""Sharded training (`parallel=fsdp`): parameters, gradients and optimizer state are split over the ranks.

Uses torch's `fully_shard`: each rank keeps 1/W of each parameter, along its first dimension. The parameters of a block
are gathered for its forward and backward pass and freed afterwards. Its gradients are reduce-scattered after each
micro-batch, so all ranks must run the same number of passes (`division.PADDED`). Sums are taken over the
ranks first and then over a rank's micro-batches: equal to `Reducer`'s up to rounding, and bit-identical at one world
size.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import Order, Step
from samebits.parallel.blocks import shard_blocks
from samebits.parallel.sharded_replica import ShardedReplica, prepare_sharding
from samebits.parallel.step_sum import StepSum


class Shards(ShardedReplica):
    """This rank's state of a sharded model: a part of each parameter, and all buffers.

    Making it is a collective call that shards the model in place, with rank 0's values. Only one block at a time is
    complete on the device. The model comes complete, on the CPU.

    Attributes:
        parameters: This rank's parts by name, in the model's order, for the optimizer: plain tensors that share their
            memory with the model's.

    Raises:
        ConfigError: The model cannot be sharded.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        prepare_sharding(model, world)
        mesh = DeviceMesh(world.device.type, list(range(world.size)))
        for _, block in [*shard_blocks(model), ("", model)]:
            whole = [parameter for parameter in block.parameters() if not isinstance(parameter, DTensor)]
            for parameter in whole:
                parameter.data = parameter.data.to(world.device).contiguous()
            for module in block.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(world.device))
            collectives.broadcast_tensors(world, [*whole, *block.buffers()])
            # Explicit for the root too: by default it keeps its gathered parameters, also through an evaluation.
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a micro-batch's weight already divides
                module.set_force_sum_reduction_for_comms(True)
                if hasattr(module, "set_reduce_scatter_unused_params"):  # not in torch 2.11
                    # A parameter that only some ranks have used still needs a sum over all ranks.
                    module.set_reduce_scatter_unused_params(True)
        self._sharded = {name: tensor for name, tensor in model.named_parameters() if isinstance(tensor, DTensor)}
        parameters = {
            # Plain tensors in the memory of the sharded ones, so
            # that fused optimizers need not know of shards (ADR 21).
            name: nn.Parameter(tensor.to_local().detach(), requires_grad=tensor.requires_grad)
            for name, tensor in self._sharded.items()
        }
        super().__init__(model, world, parameters)

    def make_reducer(
        self, order: Order, *, exact: bool, num_extras: int, synchronized: bool, compress: str
    ) -> "ShardedReducer":
        """See `ShardedReplica.make_reducer`."""
        return ShardedReducer(self.module, self, self._world, num_extras=num_extras)

    def whole_shape(self, name: str) -> torch.Size:
        """See `ShardedReplica.whole_shape`."""
        return self._sharded[name].shape

    def gather(self, name: str, part: Tensor) -> Tensor | None:
        """See `ShardedReplica.gather`."""
        shape, world = self.whole_shape(name), self._world
        # As torch cuts: equally many rows for each rank, fewer or none for the last ones.
        rows = -(-shape[0] // world.size)
        # Padded, since gather needs equal sizes on all ranks.
        padded = part.new_zeros((rows, *shape[1:]))
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in range(world.size)] if world.is_main else None
        with world.activity.waiting("gathering sharded weights"):
            dist.gather(padded, parts, dst=0)
        return None if parts is None else torch.cat([each.cpu() for each in parts])[: shape[0]]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """See `ShardedReplica.part`. Returns the same rows as of the parameters."""
        rows = -(-len(whole) // self._world.size)
        return whole[rows * self._world.rank : rows * (self._world.rank + 1)]

    def gradients(self) -> Iterator[tuple[nn.Parameter, DTensor]]:
        """Iterate over the trained parts, each with the sharded parameter whose `grad` backward sets."""
        for name, tensor in self._sharded.items():
            if tensor.requires_grad:
                yield self.parameters[name], tensor


class ShardedReducer(StepSum):
    """The sum over shards of a model. Takes steps with padding. `reduce` sets the `grad` of the shards."""

    def __init__(self, model: nn.Module, shards: Shards, world: World, *, num_extras: int) -> None:
        super().__init__(model, world, num_extras)
        self._shards = shards
        self._sizes = [1, 1, num_extras, len(self._buffers)]  # the flag, the norm's square, extras, buffers
        self._tail = torch.zeros(sum(self._sizes), dtype=torch.float64, device=world.device)

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """See `StepSum.begin`."""
        super().begin(step, loss_scale)
        self._tail.zero_()
        for shard, sharded in self._shards.gradients():
            shard.grad = sharded.grad = None

    def backward(self, loss: Tensor, extras: Tensor | None = None) -> None:
        """See `StepSum.backward`. fully_shard sums the gradients over the ranks."""
        weight = self._weight
        (loss * (weight * self._loss_scale)).backward()
        values = torch.cat([torch.zeros(2, device=self._device), self._extras(extras), self._buffers.take_change()])
        if weight:  # 0 in a padding pass, whose values may not be finite: 0 * inf would be nan
            self._tail.add_(values, alpha=weight)

    def reduce(self, flag: float = 0.0) -> None:
        """Finish the sums over all ranks; see `StepSum.reduce`. Sets `grad` of the shards' parameters."""
        squares = []
        for shard, sharded in self._shards.gradients():
            if sharded.grad is None:
                continue
            assert isinstance(sharded.grad, DTensor)
            shard.grad, sharded.grad = sharded.grad.to_local().div_(self._loss_scale), None
            squares.append(torch.linalg.vector_norm(shard.grad, dtype=torch.float64).square())
        if squares:
            self._tail[1] = torch.stack(squares).sum()
        if self._world.is_main:
            self._tail[0] = flag
        # Each rank adds in the same order, so that all have the same bits; an all-reduce does not promise that.
        gathered = self._tail.new_empty(self._world.size * len(self._tail))
        with self._world.activity.waiting("adding up buffers"):
            dist.all_gather_into_tensor(gathered, self._tail)
        total = gathered.view(self._world.size, -1).sum(0)
        *_, change = torch.split(total, self._sizes)
        self._buffers.apply(change.float())
        numbers = total[: sum(self._sizes[:3])].tolist()
        self.flag, self.norm, self.extras = numbers[0], numbers[1] ** 0.5, numbers[2:]

    def scale(self, factor: float) -> None:
        """See `StepSum.scale`."""
        for shard, _ in self._shards.gradients():
            if shard.grad is not None:
                shard.grad.mul_(factor)
