"""A step's gradients, summed over all micro-batches in one fixed order: the same bits at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lockstep.cluster import collectives
from lockstep.cluster.world import World
from lockstep.data.keyed import seed_forward
from lockstep.data.order import MicroBatch, Step
from lockstep.parallel.batch_norm import batch_norms, synchronise
from lockstep.parallel.bucket import Bucket, Leaf, is_dense
from lockstep.parallel.compress import Compression, PowerSGD, make_buckets
from lockstep.parallel.coroutines import Coroutines
from lockstep.parallel.layer_sums import LayerSums, Suspects
from lockstep.parallel.running import RunningBuffers
from lockstep.parallel.tree import Node, partials
from lockstep.parallel.tree_all_reduce import TreeAllReduce

T = TypeVar("T")
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass
class _Open:
    """A micro-batch under way, with its leaf in each bucket."""

    micro_batch: MicroBatch
    leaves: list[Leaf]


@dataclass
class _Rest:
    """What a micro-batch that waits for others has set in the process: all but this is its own anyway."""

    open: _Open | None
    generator: Tensor
    cuda_generator: Tensor | None
    buffers: list[Tensor]


class Reducer:
    """Sums gradients, changed buffers and a few figures over a step's micro-batches and all ranks.

    All ranks make theirs at the same time: it gives them rank 0's parameters and buffers. One step:

        reducer.begin(step)
        for micro_batch in step.micro_batches:
            with reducer.micro_batch(micro_batch):
                reducer.backward(loss)      # the mean over the micro-batch's samples
        reducer.reduce()                    # parameters now have the gradient of the mean over the step's samples
        optimizer.step()

    With `synchronised`, micro-batches wait for each other inside of the model, so the loop is `reducer.run(body)`, and
    all of a process's micro-batches are in memory at the same time.

    Args:
        model: On its device. Parameters that don't require a gradient are left out; frozen ones stay frozen.
        world: The ranks.
        exact: Add in tree order, so that the world size changes no bit. Otherwise in the quickest order.
        num_extras: Figures that `backward` takes along, weighted and summed like the gradients.
        synchronised: Batch norm takes its statistics over all micro-batches of a step.
        compress: How gradients are made smaller on their way; None: they are not.

    Raises:
        ValueError: A parameter or buffer is not float32 or not dense in memory, or there is nothing to train.
        ConfigError: A batch norm can't be synchronised.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        exact: bool = True,
        num_extras: int = 0,
        synchronised: bool = False,
        compress: Compression | None = None,
    ) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not named:
            raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ValueError(f"parameter {name} is {parameter.dtype}: only float32 parameters can be trained")
            if not is_dense(parameter):
                raise ValueError(f"parameter {name} has gaps in memory: make it with .contiguous()")
        # As DDP does: what every rank starts from is rank 0's.
        collectives.broadcast_tensors(world, [*model.parameters(), *model.buffers()])
        self._world = world
        self._buffers = RunningBuffers(model)
        # Backward reaches the last parameters first; buckets in that order can travel while it goes on.
        self._parameters = [parameter for _, parameter in reversed(named)]
        self._device = self._parameters[0].device
        self._sizes = [1, num_extras, len(named), len(self._buffers)]
        how = compress or Compression()
        self._exact = exact or how.in_halves  # a sum in halves is better off in a tree than in a row
        self._buckets, self.low_rank = make_buckets(
            self._parameters, sum(self._sizes), world, how, exact=self._exact, max_bytes=BUCKET_BYTES
        )
        for number, bucket in enumerate(self._buckets):
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(number, place))
        self._layer_sums = self._meet(model) if synchronised else None
        self._step: Step | None = None
        self._loss_scale = 1.0
        self._open: _Open | None = None
        self._nodes: list[list[Node]] = []
        self._exchanges: list[TreeAllReduce | PowerSGD] = []
        self.extras: list[float] = []
        self.flag = 0.0
        self.norm = 0.0

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """Get ready for a step.

        Args:
            step: Its plan for this process.
            loss_scale: A power of two by which the loss is larger in the backward pass, and gradients are made smaller
                before they are summed. Nothing is rounded by it.
        """
        self._loss_scale = loss_scale
        self._step, self._exchanges = step, []
        shares = [step.share(rank) for rank in range(self._world.size)]
        if self._exact:
            self._nodes = [partials(*share, step.num_micro_batches) for share in shares]
        else:
            self._nodes = [[share] if share[0] < share[1] else [] for share in shares]
        self._open = None
        self._buffers.begin_step()
        for bucket in self._buckets:
            bucket.begin_step(shares[self._world.rank][0])
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, body: Callable[[MicroBatch], T], suspects: Suspects | None = None) -> list[T]:
        """Call `body(micro_batch)` for each of the step's micro-batches of this process.

        Only one runs at a time, beginning with the first; synchronised ones change over wherever they wait.

        Args:
            body: The forward and backward pass.
            suspects: Gets the synchronised micro-batches that brought something not finite to a batch norm.

        Returns:
            What each call gave.
        """
        assert self._step is not None, "begin(step) comes first"
        if self._layer_sums is None:
            return [body(micro_batch) for micro_batch in self._step.micro_batches]
        return self._layer_sums.run(self._step.micro_batches, self._nodes, body, suspects)

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Around one forward and backward pass: seeds torch's generators by the micro-batch's key."""
        assert self._step is not None, "begin(step) comes first"
        assert self._layer_sums is None or self._layer_sums.is_open, "synchronised micro-batches run in `reducer.run`"
        num_leaves = self._step.num_micro_batches
        leaves = [bucket.begin_leaf(micro_batch.index, num_leaves) for bucket in self._buckets]
        self._open = _Open(micro_batch, leaves)
        seed_forward(micro_batch.forward_key, self._device)
        try:
            yield
        finally:
            self._open = None

    def backward(self, loss: Tensor, extras: Tensor | None = None) -> None:
        """Run backward for the micro-batch and add its gradients, by its weight, to the step's.

        Args:
            loss: 0-d, the mean over the micro-batch's samples.
            extras: (num_extras,) figures to be averaged over the step's samples.
        """
        assert self._open is not None, "call backward inside `with reducer.micro_batch(...)`"
        weight, leaves = self._open.micro_batch.weight, self._open.leaves
        (loss * (weight * self._loss_scale)).backward()
        missing = [
            place in leaf.missing
            for bucket, leaf in zip(self._buckets, leaves, strict=True)
            for place in range(len(bucket.parameters))
        ]
        touched = torch.ones(len(missing), device=self._device)
        if any(missing):
            touched -= torch.tensor(missing, dtype=torch.float32).to(self._device)
        if extras is None:
            extras = torch.zeros(self._sizes[1], device=self._device)
        flag = torch.zeros(1, device=self._device)
        tail = torch.cat([flag, extras.detach().float(), touched, self._buffers.take_change()])
        leaves[-1].put_tail(tail.mul_(weight))
        for bucket, leaf in zip(self._buckets, leaves, strict=True):
            if not leaf.is_over:
                self._end(bucket, leaf)

    def reduce(self, flag: float = 0.0) -> None:
        """Finish the sums over all ranks: sets every parameter's `grad`, the model's buffers, and this object's
        `extras`, `flag` and `norm` (the 2-norm of the gradient: not finite where any value of it is not).

        A parameter that had no gradient in any micro-batch of the step has `grad` None, on every rank.

        Args:
            flag: Rank 0's is given to all.
        """
        last = self._buckets[-1]
        if self._world.rank == 0:
            last.nodes[0][1].tail[0] = flag
        while len(self._exchanges) < len(self._buckets):
            self._start_next()
        for exchange in self._exchanges:
            exchange.middle()
        for exchange in self._exchanges:
            exchange.finish()
        results = [bucket.result for bucket in self._buckets if bucket.result is not None]
        *_, change = torch.split(results[-1].tail, self._sizes)
        self._buffers.apply(change)
        norms = [
            torch.linalg.vector_norm(result.values[: bucket.tail_start])
            for bucket, result in zip(self._buckets, results, strict=True)
        ]
        # One read for all figures: on a GPU each would wait for the device.
        figures = torch.cat([torch.stack(norms).norm().view(1), results[-1].tail[: sum(self._sizes[:3])]]).tolist()
        self.norm, self.flag, self.extras = figures[0], figures[1], figures[2 : 2 + self._sizes[1]]
        touched = iter(figures[2 + self._sizes[1] :])
        for bucket, result in zip(self._buckets, results, strict=True):
            for parameter, view in zip(bucket.parameters, result.views, strict=True):
                parameter.grad = view if next(touched) > 0 else None

    def scale(self, factor: float) -> None:
        """Multiply the step's gradient."""
        for bucket in self._buckets:
            if bucket.result is not None:
                bucket.result.values[: bucket.tail_start].mul_(factor)

    def undo_buffers(self) -> None:
        """Take back what the step did to the model's buffers."""
        self._buffers.put_back()
        if self.low_rank is not None:
            self.low_rank.reset()

    def _hook(self, number: int, place: int) -> Callable[[Tensor], None]:
        bucket, is_last = self._buckets[number], number + 1 == len(self._buckets)

        def take(_: Tensor) -> None:
            if self._open is None:
                return  # a backward pass outside of a step is none of ours
            leaf = self._open.leaves[number]
            bucket.take(leaf, place, 1.0 / self._loss_scale)
            # The last bucket waits for its tail; the others can go while backward is still busy.
            if not leaf.missing and not is_last:
                self._end(bucket, leaf)

        return take

    def _end(self, bucket: Bucket, leaf: Leaf) -> None:
        assert self._step is not None
        bucket.end_leaf(leaf, self._step.num_micro_batches)
        if self._layer_sums is not None:
            return  # batch norm's small messages would have to queue up behind these
        last = self._step.share(self._world.rank)[1]
        while len(self._exchanges) + 1 < len(self._buckets):
            if self._buckets[len(self._exchanges)].next_leaf < last:
                return
            self._start_next()

    def _start_next(self) -> None:
        number = len(self._exchanges)
        bucket, low = self._buckets[number], self.low_rank
        exchange = low if low and low.bucket is bucket else TreeAllReduce(bucket, self._world, self._nodes, number)
        exchange.start()
        self._exchanges.append(exchange)

    def _meet(self, model: nn.Module) -> LayerSums | None:
        layers = batch_norms(model)
        if not layers:
            return None
        places = [f"{name}, {way}" for name in layers for way in ("forward", "backward")]
        # A forward pass brings a count and two numbers a channel.
        longest = max(1 + 2 * int(layer.num_features) for layer in layers.values())  # type: ignore[arg-type]  # a module's attributes are Tensor or Module to mypy
        sums = LayerSums(self._world, self._device, places, longest, Coroutines(self._leave, self._come_back))
        synchronise(layers, sums)
        return sums

    def _leave(self) -> _Rest:
        is_cuda = self._device.type == "cuda"
        cuda_generator = torch.cuda.get_rng_state(self._device) if is_cuda else None
        rest = _Rest(self._open, torch.get_rng_state(), cuda_generator, self._buffers.put_aside())
        self._open = None
        return rest

    def _come_back(self, rest: _Rest) -> None:
        self._open = rest.open
        torch.set_rng_state(rest.generator)
        if rest.cuda_generator is not None:
            torch.cuda.set_rng_state(rest.cuda_generator, self._device)
        self._buffers.take_up(rest.buffers)
