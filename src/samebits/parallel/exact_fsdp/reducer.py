"""The sum of a step over a sharded model in exact mode: gradients go to their owners, and are added in tree order."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.order import Step
from samebits.parallel.exact_fsdp.gathering import GatheredUnits
from samebits.parallel.exact_fsdp.unit import ShardUnit
from samebits.parallel.step_sum import StepSum
from samebits.parallel.tree import Node, push


class ExactShardedReducer(StepSum):
    """The sum over shards of a model in exact mode; `reduce` sets the `grad` of this rank's parts."""

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
        self._trained, self._owners = list(reversed(trained)), torch.tensor(list(reversed(owners)))
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
        weight, self._num_started, self._used = self._weight, 0, set()
        for unit in self._units:
            unit.start_pass()
        self._gathered.begin_backward()
        (loss * (weight * self._loss_scale)).backward()
        self._start(len(self._units))
        self._units[-1].finish_reduce(self._present.num_micro_batches)
        self._gathered.end_pass()
        touched = [float(parameter in self._used) for parameter, _ in self._trained]
        tail = [self._extras(extras), torch.tensor(touched).to(loss.device), self._buffers.take_change()]
        self._tails.append(torch.cat(tail).mul_(weight))

    def reduce(self, flag: float = 0.0) -> None:
        """See `StepSum.reduce`. Sets `grad` of this rank's parts."""
        gradients: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            gradients |= unit.owned_gradients()
        norms = torch.zeros(len(self._trained), device=self._world.device)
        mine = [index for index, (parameter, _) in enumerate(self._trained) if parameter in gradients]
        if mine:
            # The function that torch's clip_grad_norm_ calls, so the norm has the same bits.
            norms[mine] = torch.stack(torch._foreach_norm([gradients[self._trained[index][0]] for index in mine]))
        head = torch.tensor([flag], device=self._world.device)
        own = torch.cat([head, norms, *self._tails])
        # Gathered and then added on each rank in tree order, since an all-reduce promises no order.
        every = own.new_empty(self._world.size * len(own))
        with self._world.activity.waiting("adding up buffers"):
            dist.all_gather_into_tensor(every, own)
        heads, norms, tails = every.view(self._world.size, -1).split([1, len(norms), len(own) - len(norms) - 1], dim=1)
        total = self._add_tails(tails)
        extras, touched, change = total.split(self._sizes)
        self._buffers.apply(change)
        norm = norms[self._owners, torch.arange(len(self._trained))].norm()
        # One transfer for all numbers: on a GPU each read waits for the device.
        numbers = torch.cat([norm.view(1), heads[0], extras, touched]).tolist()
        self.norm, self.flag, self.extras = numbers[0], numbers[1], numbers[2 : 2 + len(extras)]
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
        num_leaves, stack = self._present.num_micro_batches, list[tuple[Node, Tensor]]()
        # By micro-batch: in each pass, the ranks have neighboring ones (`division.IN_TURN`).
        in_order = tails.reshape(self._world.size, len(self._tails), -1).transpose(0, 1).reshape(-1, sum(self._sizes))
        for leaf in range(num_leaves):
            push(stack, (leaf, leaf + 1), in_order[leaf], num_leaves, Tensor.add)
        ((_, total),) = stack
        return total
