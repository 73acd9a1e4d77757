"""Gradient reduction: a step's gradients summed over all micro-batches in one fixed order, at any world size.

As in DDP, gradients are sent in buckets during backward, but the sum is over micro-batches (the leaves of `tree.py`),
not over ranks. Two micro-batches and three buckets, the last one with the tail (loss terms, flags, buffer changes):

    forward 0 | backward 0 ......... | forward 1 | backward 1 ..................... | reduce()
                 b0: leaf 0 ends                    b0: leaf 1 ends, start b0       | b0, b1, b2: middle
                     b1: leaf 0 ends                    b1: leaf 1 ends, start b1   | b0, b1, b2: finish
                         b2: leaf 0 and tail                b2: leaf 1 and tail     | start b2 first
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Step
from samebits.data.seeding import seed_forward
from samebits.parallel.batch_norm import synchronize
from samebits.parallel.bucket import Bucket, Leaf, is_dense
from samebits.parallel.compress import LOW_PRECISION, make_buckets
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.exchange.halving import make_all_reduce
from samebits.parallel.exchange.tags import bucket_tag
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.layer_sums import Suspects
from samebits.parallel.running import RunningBuffers
from samebits.parallel.tree import Node, rank_nodes

T = TypeVar("T")
BUCKET_BYTES = 25 * 1024 * 1024  # as `bucket_cap_mb` of torch's DDP


@dataclass
class _Open:
    """The micro-batch that is running, with its leaf in each bucket."""

    micro_batch: MicroBatch
    leaves: list[Leaf]


@dataclass
class _ProcessState:
    """Process-wide state of a micro-batch that waits inside `LayerSums`. All other state is on its thread's stack."""

    open: _Open | None
    generator: Tensor
    cuda_generator: Tensor | None
    buffers: list[Tensor]


class Reducer:
    """Sums gradients, buffer changes and a few extra values over a step's micro-batches and all ranks.

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
        model: On its device. Parameters that don't require a gradient are left out; frozen ones stay frozen.
        world: The ranks.
        exact: Sum in tree order, so that the world size changes no bit. Otherwise in the fastest order.
        num_extras: Number of extra values for each `backward`, weighted and summed like the gradients.
        synchronized: Compute batch norm's statistics over all micro-batches of a step.
        compress: How gradients are compressed; None: not at all.

    Raises:
        ValueError: A parameter or buffer is not float32 or not dense in memory, or there is nothing to train.
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
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not named:
            raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ValueError(f"parameter {name} is {parameter.dtype}: only float32 parameters can be trained")
            if not is_dense(parameter):
                raise ValueError(f"parameter {name} has gaps in memory: make it with .contiguous()")
        # As in DDP, every rank starts with rank 0's values.
        collectives.broadcast_tensors(world, [*model.parameters(), *model.buffers()])
        self._world = world
        self._buffers = RunningBuffers(model)
        # Backward reaches the last parameters first, so buckets in that order can be sent while it continues.
        self._parameters = [parameter for _, parameter in reversed(named)]
        self._device = self._parameters[0].device
        self._sizes = [1, num_extras, len(named), len(self._buffers)]
        self._exact = exact or compress in LOW_PRECISION  # in 16 bits a tree loses less than a running sum
        self._buckets = make_buckets(
            self._parameters, sum(self._sizes), world, compress, exact=self._exact, max_bytes=BUCKET_BYTES
        )
        for number, bucket in enumerate(self._buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(number, index))
        coroutines = Coroutines(self._save, self._restore)
        self._layer_sums = synchronize(model, world, self._device, coroutines) if synchronized else None
        self._step: Step | None = None
        self._loss_scale = 1.0
        self._open: _Open | None = None
        self._nodes: list[list[Node]] = []
        self._exchanges: list[TreeAllReduce] = []
        self.extras: list[float] = []
        self.flag = self.norm = 0.0

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """Start a step.

        Args:
            step: The step, with the micro-batches of this process.
            loss_scale: A power of two that multiplies the loss in the backward pass. Gradients are divided by it
                before they are summed. A power of two rounds nothing.
        """
        self._step, self._loss_scale, self._exchanges = step, loss_scale, []
        leaves, held = step.leaves[self._world.rank], step.division.held
        if self._exact:
            self._nodes = rank_nodes(step.leaves, step.num_micro_batches, held)
        else:
            self._nodes = [[(mine[0], mine[-1] + 1)] if mine else [] for mine in step.leaves]
        self._open = None
        self._buffers.start_step()
        for bucket in self._buckets:
            bucket.start_step(leaves, held[self._world.rank] if held else ())
        for _, flat in self._buckets[-1].nodes:
            flat.tail[0] = 0.0  # the flag of the attempt before, in sums that are held
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, body: Callable[[MicroBatch], T], suspects: Suspects | None = None) -> list[T]:
        """Call `body(micro_batch)` for each of the step's micro-batches of this process.

        Only one runs at a time, the first one first. Synchronized micro-batches switch wherever they wait.

        Args:
            body: The forward and backward pass.
            suspects: Receives the micro-batches that contributed a non-finite value to a synchronized batch norm.

        Returns:
            The result of each call.
        """
        assert self._step is not None, "begin(step) comes first"
        if self._layer_sums is None:
            return [body(micro_batch) for micro_batch in self._step.micro_batches]
        return self._layer_sums.run(self._step.micro_batches, self._nodes, body, suspects)

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Context of one forward and backward pass. Seeds torch's generators by the micro-batch's key."""
        assert self._layer_sums is None or self._layer_sums.is_open, "synchronized micro-batches run in `reducer.run`"
        self._open = _Open(micro_batch, [self._start_leaf(bucket, micro_batch) for bucket in self._buckets])
        seed_forward(micro_batch.forward_key, self._device)
        try:
            yield
        finally:
            self._open = None

    def backward(self, loss: Tensor, extras: Tensor | None = None) -> None:
        """Run backward for the micro-batch, and add its weighted gradients to the step's.

        Args:
            loss: (), the mean over the micro-batch's samples.
            extras: (num_extras,) values to average over the step's samples.
        """
        assert self._open is not None, "call backward inside `with reducer.micro_batch(...)`"
        weight, leaves = self._open.micro_batch.weight, self._open.leaves
        (loss * (weight * self._loss_scale)).backward()  # weighted here: leaves are then only added
        missing = [
            index in leaf.missing
            for bucket, leaf in zip(self._buckets, leaves, strict=True)
            for index in range(len(bucket.parameters))
        ]
        # A parameter that no micro-batch used has grad None on all ranks: optimizers then skip it, and do not decay it.
        touched = torch.ones(len(missing), device=self._device)
        if any(missing):
            touched -= torch.tensor(missing, dtype=torch.float32).to(self._device)
        extras = torch.zeros(self._sizes[1], device=self._device) if extras is None else extras
        tail = torch.cat(
            [torch.zeros(1, device=self._device), extras.detach().float(), touched, self._buffers.take_change()]
        )
        leaves[-1].put_tail(tail.mul_(weight))
        for bucket, leaf in zip(self._buckets, leaves, strict=True):
            if not leaf.is_done:
                self._end(bucket, leaf)

    def reduce(self, flag: float = 0.0) -> None:
        """Finish the sums over all ranks.

        Sets the `grad` of every parameter, the model's buffers, and this object's `extras`, `flag` and `norm` (the
        2-norm of the gradient, not finite where any of its values is not). A parameter without a gradient in any
        micro-batch of the step has `grad` None on every rank.

        Args:
            flag: A number that rank 0 sends to all ranks.
        """
        if self._world.rank == 0:
            self._buckets[-1].nodes[0][1].tail[0] = flag  # 0 in all other leaves, so the sum is rank 0's number
        while len(self._exchanges) < len(self._buckets):
            self._start_next()
        for exchange in self._exchanges:  # the second round of a bucket is sent while the next one is added up
            exchange.middle()
        for exchange in self._exchanges:
            exchange.finish()
        results = [bucket.result for bucket in self._buckets if bucket.result is not None]
        self._buffers.apply(torch.split(results[-1].tail, self._sizes)[-1])
        # Of each tensor, as in torch's clip_grad_norm_: a sharded model has no buckets, and must get the same bits.
        norms = torch._foreach_norm([view for result in results for view in result.views])
        # A single .tolist() for all numbers: on a GPU each read waits for the device.
        numbers = torch.cat([torch.stack(norms).norm().view(1), results[-1].tail[: sum(self._sizes[:3])]]).tolist()
        self.norm, self.flag, self.extras = numbers[0], numbers[1], numbers[2 : 2 + self._sizes[1]]
        touched = iter(numbers[2 + self._sizes[1] :])
        for bucket, result in zip(self._buckets, results, strict=True):
            for parameter, view in zip(bucket.parameters, result.views, strict=True):
                parameter.grad = view if next(touched) > 0 else None

    def scale(self, factor: float) -> None:
        """Multiply the step's gradient."""
        for bucket in self._buckets:
            if bucket.result is not None:
                bucket.result.values[: bucket.tail_start].mul_(factor)

    def undo_buffers(self) -> None:
        """Reset the model's buffers, to drop the step."""
        self._buffers.reset()

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        bucket, is_last = self._buckets[number], number + 1 == len(self._buckets)

        def take(_: Tensor) -> None:
            if self._open is None:
                return  # a backward pass outside of a step
            leaf = self._open.leaves[number]
            bucket.take(leaf, index, 1.0 / self._loss_scale)
            # The last bucket waits for its tail; the others can be sent while backward continues.
            if not leaf.missing and not is_last:
                self._end(bucket, leaf)

        return take

    def _start_leaf(self, bucket: Bucket, micro_batch: MicroBatch) -> Leaf:
        assert self._step is not None, "begin(step) comes first"
        return bucket.start_leaf(micro_batch.index, self._step.num_micro_batches)

    def _end(self, bucket: Bucket, leaf: Leaf) -> None:
        assert self._step is not None
        bucket.end_leaf(leaf, self._step.num_micro_batches)
        if self._layer_sums is not None:
            return  # the small messages of batch norm would queue behind these
        while len(self._exchanges) + 1 < len(self._buckets):
            # In the order of the buckets on all ranks, whatever the order of their gradients: NCCL matches by order.
            if not self._buckets[len(self._exchanges)].is_complete:
                return
            self._start_next()

    def _start_next(self) -> None:
        number = len(self._exchanges)
        exchange = make_all_reduce(self._buckets[number], self._world, self._nodes, bucket_tag(number))
        exchange.start()
        self._exchanges.append(exchange)

    def _save(self) -> _ProcessState:
        is_cuda = self._device.type == "cuda"
        cuda_generator = torch.cuda.get_rng_state(self._device) if is_cuda else None
        state = _ProcessState(self._open, torch.get_rng_state(), cuda_generator, self._buffers.snapshot())
        self._open = None
        return state

    def _restore(self, state: _ProcessState) -> None:
        self._open = state.open
        torch.set_rng_state(state.generator)
        if state.cuda_generator is not None:
            torch.cuda.set_rng_state(state.cuda_generator, self._device)
        self._buffers.restore(state.buffers)
