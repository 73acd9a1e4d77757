"""Sharded training (`parallel=fsdp`): weights, gradients and optimizer state by whole tensors.

As torch's fully_shard, a rank gathers the parameters of a block for its forward and backward pass and frees them
afterwards. But one rank owns a tensor as a whole, so the optimizer updates it with the bits of an unsharded model; and
gradients are added in the binary tree over micro-batches, so their bits do not depend on the number of ranks.

Micro-batches are dealt out in turn (`division.IN_TURN`), so the ranks run neighboring leaves of the tree at the same
time, and an owner adds them as they come. It keeps about log2(micro-batches) sums of its own tensors, and no others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import Step
from samebits.errors import ConfigError
from samebits.host_memory import return_freed_memory
from samebits.parallel.blocks import shard_blocks
from samebits.parallel.exact_fsdp.unit import ShardUnit, assign_owners
from samebits.parallel.exchange.part import Message
from samebits.parallel.exchange.tree_all_reduce import post, wait_all
from samebits.parallel.reduce import StepSum
from samebits.parallel.tree import Node, push

# When the units of a sharded model are gathered and freed, by hooks of its blocks.


class GatheredUnits:
    """The units of a model: those of its blocks, in order, then what is outside of all blocks, if anything."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], units: Sequence[ShardUnit]
    ) -> None:
        self.units = units
        self.num_blocks = len(blocks)
        self._is_in_backward = False
        for number, block in enumerate(blocks):
            self._add_hooks(number, block)
        model.register_forward_pre_hook(self._begin_forward)
        model.register_forward_hook(self._end_forward)

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


# The sum of a step over a sharded model: gradients go to their owners, and are added in tree order.


class ExactShardedReducer(StepSum):
    """The sum over shards of a model; `reduce` sets the `grad` of this rank's parts."""

    def __init__(
        self,
        model: nn.Module,
        gathered: GatheredUnits,
        trained: Sequence[tuple[nn.Parameter, nn.Parameter]],
        owners: Sequence[int],
        world: World,
        num_extras: int,
    ) -> None:
        super().__init__(model, world, num_extras)
        self._gathered = gathered
        # In the order of `Reducer`, which sends the last ones first: the gradient's norm is then the same sum.
        self._trained = list(reversed(trained))
        self._owners = torch.tensor(list(reversed(owners)))
        self._sizes = [num_extras, len(trained), len(self._buffers)]
        # Backward reaches the last block first, and what is outside of all blocks last.
        blocks = gathered.units[: gathered.num_blocks]
        self._units = [*reversed(blocks), *gathered.units[gathered.num_blocks :]]
        for unit in self._units:
            for piece in unit.pieces.values():
                for parameter in piece.trained:
                    parameter.register_post_accumulate_grad_hook(self._hook(unit))
        self._num_started = 0
        self._used: set[nn.Parameter] = set()
        self._tails: list[Tensor] = []

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """See `StepSum.begin`."""
        super().begin(step, loss_scale)
        self._tails = []
        self._gathered.end_pass()
        for unit in self._units:
            unit.start_step()
        for parameter, part in self._trained:
            parameter.grad = part.grad = None

    def backward(self, loss: Tensor, extras: Tensor | None = None) -> None:
        """See `StepSum.backward`. Sends the micro-batch's weighted gradients to their owners."""
        weight = self._weight
        self._num_started = 0
        self._used = set()
        for unit in self._units:
            unit.start_pass()
        self._gathered.begin_backward()
        (loss * (weight * self._loss_scale)).backward()
        self._start(len(self._units))
        self._units[-1].finish_reduce(self._present.num_micro_batches)
        self._gathered.end_pass()
        touched = [float(parameter in self._used) for parameter, _ in self._trained]
        tail = [
            self._extras(extras),
            torch.tensor(touched).to(loss.device),
            self._buffers.take_change(),
        ]
        self._tails.append(torch.cat(tail).mul_(weight))

    def reduce(self, flag: float = 0.0) -> None:
        """See `StepSum.reduce`. Sets `grad` of this rank's parts."""
        gradients: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            gradients |= unit.owned_gradients()
        norms = torch.zeros(len(self._trained), device=self._world.device)
        mine = [
            index for index, (parameter, _) in enumerate(self._trained) if parameter in gradients
        ]
        if mine:
            # The function that torch's clip_grad_norm_ calls, so the norm has the same bits.
            norms[mine] = torch.stack(
                torch._foreach_norm([gradients[self._trained[index][0]] for index in mine])
            )
        head = torch.tensor([flag], device=self._world.device)
        own = torch.cat([head, norms, *self._tails])
        # Gathered and then added on each rank in tree order, since an all-reduce promises no order.
        every = own.new_empty(self._world.size * len(own))
        with self._world.activity.waiting("adding up buffers"):
            dist.all_gather_into_tensor(every, own)
        heads, norms, tails = every.view(self._world.size, -1).split(
            [1, len(norms), len(own) - len(norms) - 1], dim=1
        )
        total = self._add_tails(tails)
        extras, touched, change = total.split(self._sizes)
        self._buffers.apply(change)
        norm = norms[self._owners, torch.arange(len(self._trained))].norm()
        # One transfer for all numbers: on a GPU each read waits for the device.
        numbers = torch.cat([norm.view(1), heads[0], extras, touched]).tolist()
        self.norm = numbers[0]
        self.flag = numbers[1]
        self.extras = numbers[2 : 2 + len(extras)]
        for (parameter, part), count in zip(self._trained, numbers[2 + len(extras) :], strict=True):
            # The parts of other ranks' tensors have no rows, and get a gradient so that each has its optimizer state.
            gradient = gradients[parameter] if parameter in gradients else torch.zeros_like(part)
            part.grad = gradient if count > 0 else None

    def scale(self, factor: float) -> None:
        """See `StepSum.scale`."""
        for _, part in self._trained:
            if part.grad is not None:
                part.grad.mul_(factor)

    def _hook(self, unit: ShardUnit) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            if self._now is None:
                return  # a backward pass outside of a step
            assert isinstance(parameter, nn.Parameter)
            self._used.add(parameter)
            unit.take(parameter, 1.0 / self._loss_scale if self._now.weight else 0.0)
            if not unit.missing:
                if unit.can_free_early:
                    unit.free()
                self._start_complete()

        return take

    def _start_complete(self) -> None:
        """Start the reduction of the units whose gradients are there, in the same order on all ranks."""
        stop = self._num_started
        while stop < len(self._units) and not self._units[stop].missing:
            stop += 1
        self._start(stop)

    def _start(self, stop: int) -> None:
        """Start the reduction of all units before `stop`. One at a time is under way: each takes memory."""
        leaves = self._leaves()
        for number in range(self._num_started, stop):
            if number > 0:
                self._units[number - 1].finish_reduce(self._present.num_micro_batches)
            self._units[number].start_reduce(leaves)
        self._num_started = max(self._num_started, stop)

    def _leaves(self) -> list[int | None]:
        """Return the micro-batch of each rank in the current pass; None for a pass with weight 0."""
        number = len(self._tails)
        return [mine[number] if number < len(mine) else None for mine in self._present.leaves]

    def _add_tails(self, tails: Tensor) -> Tensor:
        """Add the values behind the gradients, (ranks, passes * length), in tree order; return their sum, (length,)."""
        num_leaves = self._present.num_micro_batches
        stack = list[tuple[Node, Tensor]]()
        # By micro-batch: in each pass, the ranks have neighboring ones (`division.IN_TURN`).
        in_order = (
            tails.reshape(self._world.size, len(self._tails), -1)
            .transpose(0, 1)
            .reshape(-1, sum(self._sizes))
        )
        for leaf in range(num_leaves):
            push(stack, (leaf, leaf + 1), in_order[leaf], num_leaves, Tensor.add)
        ((_, total),) = stack
        return total


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
        self.module = model
        self._world = world
        prepare_sharding(model, world)
        collectives.broadcast_tensors(world, [*model.buffers()])
        named = dict(model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        owners = dict(
            zip(
                named,
                assign_owners([each.numel() for each in named.values()], world.size),
                strict=True,
            )
        )
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
                each.detach()
                if owners[name] == world.rank
                else each.new_empty((0, *each.shape[1:])),
                requires_grad=each.requires_grad,
            )
            for name, each in named.items()
        }
        self.trained: nn.Module = nn.ParameterList(self.parameters.values())
        self._gathered = GatheredUnits(model, blocks, units)

    def make_reducer(self, *, num_extras: int, synchronized: bool) -> ExactShardedReducer:
        """See `WholeReplica.make_reducer`. Settings other than `num_extras` do not apply to a sharded model."""
        trained = [
            (each, self.parameters[name])
            for name, each in self.module.named_parameters()
            if each.requires_grad
        ]
        owners = {each: self._owners[name] for name, each in self.module.named_parameters()}
        places = [owners[each] for each, _ in trained]
        return ExactShardedReducer(
            self.module, self._gathered, trained, places, self._world, num_extras
        )

    def whole_shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter in the unsharded model."""
        return self._shapes[name]

    def gather(self, name: str, part: Tensor) -> Tensor | None:
        """Gather a part, (rows, ...), of a parameter or a state, on rank 0's host; None on others.

        Called on all ranks. The owner sends the tensor to rank 0.
        """
        world = self._world
        owner = self._owners[name]
        if world.rank not in (0, owner):
            return None
        if owner == 0:
            return part.detach().cpu()
        values = (
            part.detach().contiguous()
            if world.rank == owner
            else part.new_empty(self.whole_shape(name))
        )
        with world.activity.waiting("gathering sharded weights"):
            wait_all(
                post(
                    world,
                    [Message(values, owner if world.is_main else 0, 0, is_receive=world.is_main)],
                )
            )
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
        return {
            name: tensor
            for name, tensor in tensors.items()
            if self.sharded_like(name, tensor, optimizer) is None
        }

    def state(self) -> dict[str, Tensor]:
        """See `WholeReplica.state`. Returns this rank's parts of the parameters, in the model's own memory."""
        state: dict[str, Tensor] = self.module.state_dict()
        return {
            name: self.parameters[name].detach() if name in self.parameters else state[name]
            for name in state
        }

    def gather_all(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `WholeReplica.gather_all`. Gathers in rank 0's host memory; returns an empty dict on the other ranks."""
        whole = {}
        for name, tensor in state.items():
            gathered = (
                self.gather(name, tensor) if name in self.parameters else tensor.detach().cpu()
            )
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
            whole = (
                state[name].to(here.device, here.dtype)
                if state is not None
                else here.new_empty(shape)
            )
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
            raise ConfigError(
                f"parallel=fsdp cannot shard this model: {problem}", fix="Set parallel=ddp."
            )
