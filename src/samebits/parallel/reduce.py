"""Gradient reduction: a step's gradients summed over all micro-batches in one fixed order, at any world size.

As in DDP, gradients are sent in buckets during backward, but the sum is over micro-batches (the leaves of `tree.py`),
not over ranks. Two micro-batches and three buckets, the last one with the tail (loss terms, flags, buffer changes):

    forward 0 | backward 0 ......... | forward 1 | backward 1 ..................... | reduce()
                 b0: leaf 0 ends                    b0: leaf 1 ends, start b0       | b0, b1, b2: middle
                     b1: leaf 0 ends                    b1: leaf 1 ends, start b1   | b0, b1, b2: finish
                         b2: leaf 0 and tail                b2: leaf 1 and tail     | start b2 first
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Step
from samebits.parallel.batch_norm import synchronize
from samebits.parallel.bucket import Leaf
from samebits.parallel.bucket_sum import LOW_PRECISION, BucketSum, make_buckets
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.layer_sums import Suspects
from samebits.parallel.step_sum import StepSum

T = TypeVar("T")
BUCKET_BYTES = 25 * 1024 * 1024  # as `bucket_cap_mb` of torch's DDP
# Between machines: what the last bucket, which is complete when backward ends, has of all bytes; and fewest bytes of a
# bucket, 8 ms at 1 Gbit/s.
LAST_SHARE, MIN_LINK_BYTES = 16, 1024 * 1024


@dataclass
class _ProcessState:
    """Process-wide state of a micro-batch that waits inside `LayerSums`. All other state is on its thread's stack."""

    now: MicroBatch | None
    leaves: list[Leaf]
    generator: Tensor
    cuda_generator: Tensor | None
    buffers: list[Tensor]


def bucket_bytes(parameters: Sequence[nn.Parameter], world: World) -> int:
    """Return the maximum size of a bucket of float32 gradients.

    On one machine, each further message costs more than it hides. Between machines, small buckets keep the link busy
    during backward, and while others are added or on their way inside a machine.
    """
    if world.num_hosts == 1 or world.membership is not None:  # the buckets must not depend on a world that may change
        return BUCKET_BYTES
    return min(BUCKET_BYTES, max(MIN_LINK_BYTES, sum(4 * each.numel() for each in parameters) // LAST_SHARE))


class Reducer(StepSum):
    """The sum over whole copies of a model.

    Making one is a collective call: all ranks receive rank 0's parameters and buffers. One step:

        reducer.begin(step)
        for micro_batch in step.micro_batches:
            with reducer.micro_batch(micro_batch):
                reducer.backward(loss)      # the mean over the micro-batch's samples
        reducer.reduce()                    # parameters now have the gradient of the mean over the step's samples
        optimizer.step()

    With `synchronized`, micro-batches wait for each other inside the model: the loop is then `reducer.run(body)`, and
    all micro-batches of a process are in memory at the same time.

    Args:
        model: On its device, as `check_trainable` and `prepare_model` leave it: its trained parameters are float32 and
            dense. Parameters that don't require a gradient are left out; frozen ones stay frozen.
        world: The ranks.
        exact: Sum in tree order, so that the world size changes no bit. Otherwise in the fastest order.
        num_extras: Number of extra values for each `backward`, weighted and summed like the gradients.
        synchronized: Compute batch norm's statistics over all micro-batches of a step.
        compress: How gradients are compressed; None: not at all.

    Raises:
        ConfigError: The class of a batch norm cannot be synchronized.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        exact: bool = True,
        num_extras: int = 0,
        synchronized: bool = False,
        compress: str = "none",
    ) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # As in DDP, every rank starts with rank 0's values.
        collectives.broadcast_tensors(world, [*model.parameters(), *model.buffers()])
        super().__init__(model, world, num_extras)
        # Backward reaches the last parameters first, so buckets in that order can be sent while it continues.
        self._parameters = trained[::-1]
        self._sizes = [1, num_extras, len(trained), len(self._buffers)]
        exact = exact or compress in LOW_PRECISION  # in 16 bits a tree loses less than a running sum
        buckets = make_buckets(
            self._parameters,
            sum(self._sizes),
            world,
            compress,
            exact=exact,
            max_bytes=bucket_bytes(self._parameters, world),
        )
        self._sum = BucketSum(buckets, world)
        for number, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(number, index))
        coroutines = Coroutines(self._save, self._restore)
        self._layer_sums = synchronize(model, world, self._device, coroutines) if synchronized else None

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """See `StepSum.begin`."""
        super().begin(step, loss_scale)
        self._sum.start_step(step)
        for _, flat in self._sum.buckets[-1].nodes:
            flat.tail[0] = 0.0  # the flag of the attempt before, in sums that are held
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, body: Callable[[MicroBatch], T], suspects: Suspects | None = None) -> list[T]:
        """See `StepSum.run`."""
        if self._layer_sums is None:
            return super().run(body, suspects)
        return self._layer_sums.run(self._present.micro_batches, self._sum.nodes, body, suspects)

    def backward(self, loss: Tensor, extras: Tensor | None = None) -> None:
        """See `StepSum.backward`."""
        weight = self._weight
        (loss * (weight * self._loss_scale)).backward()  # weighted here: leaves are then only added
        # A parameter that no micro-batch used has grad None on all ranks: optimizers then skip it, and do not decay it.
        flag = torch.zeros(1, device=self._device)
        tail = torch.cat([flag, self._extras(extras), self._sum.used(), self._buffers.take_change()])
        self._sum.leaves[-1].put_tail(tail.mul_(weight))
        for number, leaf in enumerate(self._sum.leaves):
            if not leaf.is_done:
                self._complete(number)

    def reduce(self, flag: float = 0.0) -> None:
        """See `StepSum.reduce`."""
        if self._world.rank == 0:
            self._sum.buckets[-1].nodes[0][1].tail[0] = flag  # 0 in all other leaves, so the sum is rank 0's number
        results = self._sum.finish()
        self._buffers.apply(torch.split(results[-1].tail, self._sizes)[-1])
        # Of each tensor, as in torch's clip_grad_norm_: a sharded model has no buckets, and must get the same bits.
        norms = torch._foreach_norm([view for result in results for view in result.views])
        # A single .tolist() for all numbers: on a GPU each read waits for the device.
        numbers = torch.cat([torch.stack(norms).norm().view(1), results[-1].tail[: sum(self._sizes[:3])]]).tolist()
        self.norm, self.flag, self.extras = numbers[0], numbers[1], numbers[2 : 2 + self._num_extras]
        for parameter, gradient in self._sum.gradients(results, numbers[2 + self._num_extras :]):
            parameter.grad = gradient

    def scale(self, factor: float) -> None:
        """See `StepSum.scale`."""
        for bucket in self._sum.buckets:
            if bucket.result is not None:
                bucket.result.values[: bucket.tail_start].mul_(factor)

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        bucket, is_last = self._sum.buckets[number], number + 1 == len(self._sum.buckets)

        def take(_: Tensor) -> None:
            if self._now is None:
                return  # a backward pass outside of a step
            leaf = self._sum.leaves[number]
            bucket.take(leaf, index, 1.0 / self._loss_scale)
            # The last bucket waits for its tail; the others can be sent while backward continues.
            if not leaf.missing and not is_last:
                self._complete(number)

        return take

    def _enter(self, micro_batch: MicroBatch) -> None:
        assert self._layer_sums is None or self._layer_sums.is_open, "synchronized micro-batches run in `reducer.run`"
        assert self._step is not None, "begin(step) comes first"
        self._sum.start_leaves(micro_batch.index)
        self._now = micro_batch

    def _complete(self, number: int) -> None:
        self._sum.buckets[number].add_given(self._sum.leaves[number], 1.0 / self._loss_scale)
        self._end(number)

    def _end(self, number: int) -> None:
        # The small messages of synchronized batch norm would queue behind these.
        self._sum.end_leaf(number, may_send=self._layer_sums is None)

    def _save(self) -> _ProcessState:
        is_cuda = self._device.type == "cuda"
        cuda_generator = torch.cuda.get_rng_state(self._device) if is_cuda else None
        state = _ProcessState(
            self._now, self._sum.leaves, torch.get_rng_state(), cuda_generator, self._buffers.snapshot()
        )
        self._now = None
        return state

    def _restore(self, state: _ProcessState) -> None:
        self._now, self._sum.leaves = state.now, state.leaves
        torch.set_rng_state(state.generator)
        if state.cuda_generator is not None:
            torch.cuda.set_rng_state(state.cuda_generator, self._device)
        self._buffers.restore(state.buffers)
