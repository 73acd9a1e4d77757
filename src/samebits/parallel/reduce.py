"""Gradient reduction: a step's gradients summed over all micro-batches in one fixed order, at any world size.

As in DDP, gradients are sent in buckets during backward, but the sum is over micro-batches (the leaves of `tree.py`),
not over ranks. Two micro-batches and three buckets, the last one with the tail (loss terms, flags, buffer changes):

    forward 0 | backward 0 ......... | forward 1 | backward 1 ..................... | reduce()
                 b0: leaf 0 ends                    b0: leaf 1 ends, start b0       | b0, b1, b2: middle
                     b1: leaf 0 ends                    b1: leaf 1 ends, start b1   | b0, b1, b2: finish
                         b2: leaf 0 and tail                b2: leaf 1 and tail     | start b2 first
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Step
from samebits.data.seeding import seed_forward
from samebits.parallel.bucket import Bucket, Flat, Leaf
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.exchange.in_threads import ExchangeThreads, are_worth_threads
from samebits.parallel.exchange.part import bucket_tag
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.layer_sums import Suspects, synchronize
from samebits.parallel.running import RunningBuffers
from samebits.parallel.tree import Node, rank_nodes

# Buckets summed over a step's micro-batches and all ranks: under the engine's reducer, and under own loops.
#
# start_step                    before the step's first micro-batch
#   start_leaves                before a micro-batch's backward pass
#     (hooks fill the leaves)
#   end_leaf                    for each bucket: the leaf enters the tree; in the last micro-batch, complete buckets
#                               are sent while backward continues; between machines, threads do all the rest
# start_all, finish             after the last micro-batch's backward pass: every rank has the same sums


JOINED_BYTES = 1 << 20  # of a bucket: copying a larger one costs as much as a message


class JoinedAllReduce:
    """The all-reduce of several buckets in one step, with the methods of a `TreeAllReduce`.

    For gradients and what the buffers have changed by. Posting a message and its receive takes about half a
    millisecond, whatever its size: a twentieth of a small network's step. An all-reduce adds value by value, so it does
    not matter for the bits which bucket a value is in.

    Args:
        parts: The buckets, which have the same nodes. The last `advance` sets their `result`.
        memory: A bucket that is at least as long as all of them, for copies. Its values behind them are zero.
        tag: Of the first of the joined buckets, from `bucket_tag`.
    """

    def __init__(
        self,
        parts: Sequence[Bucket],
        memory: Bucket,
        world: World,
        nodes: list[list[Node]],
        tag: int,
    ) -> None:
        self._parts = parts
        self._memory = memory
        self._length = sum(part.length for part in parts)
        memory.start_step(())
        memory.nodes = [(node, memory.flat()) for node, _ in parts[0].nodes]
        self._all_reduce = TreeAllReduce(memory, world, nodes, tag)

    def start(self) -> None:
        """Send copies of this rank's nodes."""
        for (_, flat), *own in zip(
            self._memory.nodes, *(part.nodes for part in self._parts), strict=True
        ):
            # Copies: the buckets have memory of their own, and one message needs it in one piece.
            torch.cat([each.values for _, each in own], out=flat.values[: self._length])
        self._all_reduce.start()

    def advance(self) -> bool:
        """See `TreeAllReduce.advance`. Copies complete sums into the buckets."""
        if not self._all_reduce.advance():
            return False
        assert self._memory.result is not None
        sums = self._memory.result.values[: self._length].split(
            [part.length for part in self._parts]
        )
        for part, values in zip(self._parts, sums, strict=True):
            result = part.nodes[0][1] if part.nodes else part.flat()
            result.values.copy_(values)
            part.settle(result)
        return True


class BucketSum:
    """Several buckets, of which the last one has the tail.

    Args:
        number: Number of this sum; different for all sums of a process that are under way at the same time.

    Attributes:
        buckets: The buckets.
        world: The ranks; may change between two steps.
        nodes: For each rank, the nodes that it sums in this step.
        exchanges: The all-reduces of this step so far, in the order of the buckets.
        leaves: The present micro-batch's leaf in each bucket.
    """

    def __init__(self, buckets: Sequence[Bucket], world: World, number: int = 0) -> None:
        self.buckets = list(buckets)
        self.world = world
        self._number = number
        self.nodes: list[list[Node]] = []
        self.exchanges: list[TreeAllReduce | JoinedAllReduce] = []
        self.leaves: list[Leaf] = []
        self._num_parameters = sum(len(bucket.parameters) for bucket in buckets)
        self._num_leaves = 0
        self._joined: Bucket | None = None
        self._threads: ExchangeThreads | None = None

    def start_step(self, step: Step) -> None:
        """Start a step, and free the sums of the step before."""
        self.end_threads()
        self.nodes = nodes_of(step)
        self.exchanges = []
        self.leaves = []
        self._num_leaves = step.num_micro_batches
        rank = self.world.rank
        held = step.division.held
        for bucket in self.buckets:
            bucket.start_step(step.leaves[rank], held[rank] if held else ())

    def start_leaves(self, index: int) -> None:
        """Start taking the gradients of a micro-batch, by its index in the step; see `Bucket.start_leaf`."""
        self.leaves = [bucket.start_leaf(index, self._num_leaves) for bucket in self.buckets]

    def used(self) -> Tensor:
        """Return for each parameter 1 if the micro-batch has its gradient, otherwise 0: (num_parameters,)."""
        used = torch.ones(self._num_parameters, device=self.buckets[0].device)
        position = 0
        missing = list[int]()
        for bucket, leaf in zip(self.buckets, self.leaves, strict=True):
            missing += [position + index for index in leaf.missing]
            position += len(bucket.parameters)
        if missing:
            used[torch.tensor(missing).to(used.device)] = 0.0
        return used

    def end_leaf(self, number: int, *, may_send: bool) -> None:
        """Enter the micro-batch's leaf of a bucket into the tree.

        Args:
            may_send: Whether buckets whose micro-batches are all done are sent now. The last one waits for its tail.
        """
        self.buckets[number].end_leaf(self.leaves[number], self._num_leaves)
        # In the order of the buckets on all ranks, whatever the order of their gradients: NCCL matches by order.
        while may_send and len(self.exchanges) + 1 < len(self.buckets):
            if not self.buckets[len(self.exchanges)].is_complete:
                return
            if (
                self._threads is None
                and self.buckets[0].device.type == "cpu"
                and are_worth_threads(self.world)
            ):
                self._threads = ExchangeThreads()
            self._start_next()

    def end_threads(self) -> None:
        """Return when no thread uses the buckets any more: the step is complete, or its group has ended."""
        threads = self._threads
        self._threads = None
        if threads is not None:
            threads.join()

    def start_all(self, joined: Bucket | None = None) -> None:
        """Send what is not sent. Other work may follow before `finish`.

        A `joined` bucket, with the same nodes, is summed in the messages of the last one.
        """
        while len(self.exchanges) < len(self.buckets):
            self._start_next(joined)

    def finish(self) -> list[Flat]:
        """Finish the sums over all ranks; return those of each bucket, valid until the next `start_step`."""
        self.start_all()
        if self._threads is not None:
            self._threads.finish()
        under_way = self.exchanges if self._threads is None else []
        while under_way:  # the second round of a bucket is sent while the next one is added up
            under_way = [exchange for exchange in under_way if not exchange.advance()]
        return [bucket.result for bucket in self.buckets if bucket.result is not None]

    def gradients(
        self, results: Sequence[Flat], used: Iterable[float]
    ) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Iterate over the parameters with their gradients, of any shape; None where no micro-batch has used one.

        Args:
            results: What `finish` has returned.
            used: The sum of `used` over all micro-batches.
        """
        counts = iter(used)
        for bucket, result in zip(self.buckets, results, strict=True):
            for parameter, view in zip(bucket.parameters, result.views, strict=True):
                yield parameter, view if next(counts) > 0 else None

    def _start_next(self, joined: Bucket | None = None) -> None:
        number = len(self.exchanges)
        bucket = self.buckets[number]
        tag = bucket_tag(number, self._number)
        exchange: TreeAllReduce | JoinedAllReduce
        if joined is None or number + 1 < len(self.buckets):
            exchange = TreeAllReduce(bucket, self.world, self.nodes, tag)
        else:
            if self._joined is None:
                self._joined = Bucket(
                    [], bucket.length + joined.length, self.world.size, bucket.device
                )
            exchange = JoinedAllReduce([bucket, joined], self._joined, self.world, self.nodes, tag)
        exchange.start()
        self.exchanges.append(exchange)
        if self._threads is not None:
            self._threads.put(exchange.advance)


def nodes_of(step: Step) -> list[list[Node]]:
    """Return for each rank the nodes of a step that it sums, in tree order."""
    return rank_nodes(step.leaves, step.num_micro_batches, step.division.held)


def group(parameters: Sequence[nn.Parameter], max_bytes: int) -> list[list[nn.Parameter]]:
    """Split float32 parameters, in order, into groups of at most `max_bytes`, or of one larger parameter."""
    groups: list[list[nn.Parameter]] = [[]]
    num_bytes = 0
    for parameter in parameters:
        if groups[-1] and num_bytes + 4 * parameter.numel() > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(parameter)
        num_bytes += 4 * parameter.numel()
    return groups


# The sums of a step, over the copies of a model and after a loss.
#
# begin          the step's start: buffers are stored, gradients are dropped
#   run            for each micro-batch of this rank:
#     micro_batch      its random numbers; one forward and backward pass
#       backward
# reduce         the sums over all ranks: gradients, buffers, extras, the flag
#   undo_buffers   where the step is skipped


T = TypeVar("T")
BUCKET_BYTES = 25 * 1024 * 1024  # as `bucket_cap_mb` of torch's DDP
# Between machines: what the last bucket, which is complete when backward ends, has of all bytes; and fewest bytes of a
# bucket, 8 ms at 1 Gbit/s.
LAST_SHARE = 16
MIN_LINK_BYTES = 1024 * 1024


def bucket_bytes(parameters: Sequence[nn.Parameter], world: World) -> int:
    """Return the maximum size of a bucket of float32 gradients.

    On one machine, each further message costs more than it hides. Between machines, small buckets keep the link busy
    during backward, and while others are added or on their way inside a machine.
    """
    if (
        world.num_hosts == 1 or world.membership is not None
    ):  # the buckets must not depend on a world that may change
        return BUCKET_BYTES
    return min(
        BUCKET_BYTES,
        max(MIN_LINK_BYTES, sum(4 * each.numel() for each in parameters) // LAST_SHARE),
    )


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
        model: On its device, as `check_trainable` and `prepare_model` leave it: its trained parameters are float32 and
            dense. Parameters that don't require a gradient are left out; frozen ones stay frozen.
        world: The ranks.
        num_extras: Number of extra values for each `backward`, weighted and summed like the gradients.
        synchronized: Compute batch norm's statistics over all micro-batches of a step.

    Attributes:
        extras: The means of the extra values over the step's samples, after `reduce`.
        flag: The number that rank 0 has sent, after `reduce`.
        norm: The 2-norm of the gradient, after `reduce`; not finite where any of its values is not.

    Raises:
        ConfigError: The class of a batch norm cannot be synchronized.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        num_extras: int = 0,
        synchronized: bool = False,
    ) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # As in DDP, every rank starts with rank 0's values.
        collectives.broadcast_tensors(world, [*model.parameters(), *model.buffers()])
        self._world = world
        self._num_extras = num_extras
        self._device = trained[0].device
        self._buffers = RunningBuffers(model)
        self._step: Step | None = None
        self._now: MicroBatch | None = None
        self._loss_scale = 1.0
        self.extras: list[float] = []
        self.flag = self.norm = 0.0
        # Backward reaches the last parameters first, so buckets in that order can be sent while it continues.
        self._parameters = trained[::-1]
        self._sizes = [1, num_extras, len(trained), len(self._buffers)]
        # The length of a bucket must not depend on a world whose size may change.
        num_chunks = world.size if world.membership is None else 1
        # In the order in which they are sent. The last one has the tail.
        *groups, last = group(self._parameters, bucket_bytes(self._parameters, world))
        buckets = [Bucket(each, 0, num_chunks, self._device) for each in groups]
        buckets.append(Bucket(last, sum(self._sizes), num_chunks, self._device))
        self._sum = BucketSum(buckets, world)
        for number, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(number, index))
        coroutines = Coroutines(self._save)
        self._layer_sums = (
            synchronize(model, world, self._device, coroutines) if synchronized else None
        )

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """Start a step.

        Args:
            loss_scale: A power of two that multiplies the loss in the backward pass. Gradients are divided by it
                before they are summed. A power of two rounds nothing.
        """
        self._step = step
        self._loss_scale = loss_scale
        self._now = None
        self._buffers.start_step()
        self._sum.start_step(step)
        for _, flat in self._sum.buckets[-1].nodes:
            flat.tail[0] = 0.0  # the flag of the attempt before, in sums that are held
        for parameter in self._parameters:
            parameter.grad = None

    def run(self, body: Callable[[MicroBatch], T], suspects: Suspects | None = None) -> list[T]:
        """Call `body(micro_batch)` for each of the step's micro-batches of this process.

        Only one runs at a time, the first one first. Synchronized micro-batches switch wherever they wait.

        Args:
            suspects: Receives the micro-batches that contributed a non-finite value to a synchronized batch norm.

        Returns:
            The result of each call.
        """
        micro_batches = self._present.micro_batches
        if self._layer_sums is None:
            return [body(micro_batch) for micro_batch in micro_batches]
        return self._layer_sums.run(micro_batches, self._sum.nodes, body, suspects)

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Context of one forward and backward pass. Seeds torch's generators by the micro-batch's key."""
        assert self._layer_sums is None or self._layer_sums.is_open, (
            "synchronized micro-batches run in `reducer.run`"
        )
        assert self._step is not None, "begin(step) comes first"
        self._sum.start_leaves(micro_batch.index)
        self._now = micro_batch
        seed_forward(micro_batch.forward_key, self._device)
        try:
            yield
        finally:
            self._now = None

    @property
    def _present(self) -> Step:
        assert self._step is not None, "begin(step) comes first"
        return self._step

    def backward(self, loss: Tensor, extras: Tensor | None = None) -> None:
        """Run backward for the micro-batch, and add its weighted gradients to the step's.

        Args:
            loss: (), the mean over the micro-batch's samples.
            extras: (num_extras,) values to average over the step's samples; None: zeros.
        """
        assert self._now is not None, "call backward inside `with reducer.micro_batch(...)`"
        weight = self._now.weight
        (loss * (weight * self._loss_scale)).backward()  # weighted here: leaves are then only added
        if extras is None:
            extras = torch.zeros(self._num_extras, device=self._device)
        # A parameter that no micro-batch used has grad None on all ranks: optimizers then skip it, and do not decay it.
        flag = torch.zeros(1, device=self._device)
        tail = torch.cat(
            [flag, extras.detach().float(), self._sum.used(), self._buffers.take_change()]
        )
        self._sum.leaves[-1].put_tail(tail.mul_(weight))
        for number, leaf in enumerate(self._sum.leaves):
            if not leaf.is_done:
                self._complete(number)

    def reduce(self, flag: float = 0.0) -> None:
        """Finish the sums over all ranks.

        Sets the `grad` of every parameter, the model's buffers, and this object's `extras`, `flag` and `norm`. A
        parameter without a gradient in any micro-batch of the step has `grad` None on every rank.

        Args:
            flag: A number that rank 0 sends to all ranks.
        """
        if self._world.rank == 0:
            self._sum.buckets[-1].nodes[0][1].tail[0] = (
                flag  # 0 in all other leaves, so the sum is rank 0's number
            )
        results = self._sum.finish()
        self._buffers.apply(torch.split(results[-1].tail, self._sizes)[-1])
        # Of each tensor, as in torch's clip_grad_norm_.
        norms = torch._foreach_norm([view for result in results for view in result.views])
        # A single .tolist() for all numbers: on a GPU each read waits for the device.
        numbers = torch.cat(
            [torch.stack(norms).norm().view(1), results[-1].tail[: sum(self._sizes[:3])]]
        ).tolist()
        self.norm = numbers[0]
        self.flag = numbers[1]
        self.extras = numbers[2 : 2 + self._num_extras]
        for parameter, gradient in self._sum.gradients(results, numbers[2 + self._num_extras :]):
            parameter.grad = gradient

    def scale(self, factor: float) -> None:
        """Multiply the step's gradient."""
        for bucket in self._sum.buckets:
            if bucket.result is not None:
                bucket.result.values[: bucket.tail_start].mul_(factor)

    def undo_buffers(self) -> None:
        """Reset the model's buffers, to drop the step."""
        self._buffers.reset()

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        bucket = self._sum.buckets[number]
        is_last = number + 1 == len(self._sum.buckets)

        def take(_: Tensor) -> None:
            if self._now is None:
                return  # a backward pass outside of a step
            leaf = self._sum.leaves[number]
            bucket.take(leaf, index, 1.0 / self._loss_scale)
            # The last bucket waits for its tail; the others can be sent while backward continues.
            if not leaf.missing and not is_last:
                self._complete(number)

        return take

    def _complete(self, number: int) -> None:
        self._sum.buckets[number].add_given(self._sum.leaves[number], 1.0 / self._loss_scale)
        self._end(number)

    def _end(self, number: int) -> None:
        # The small messages of synchronized batch norm would queue behind these.
        self._sum.end_leaf(number, may_send=self._layer_sums is None)

    def _save(self) -> Callable[[], None]:
        """Keep the process-wide state of a micro-batch that waits inside `LayerSums`; the rest is on its stack."""
        now = self._now
        leaves = self._sum.leaves
        is_cuda = self._device.type == "cuda"
        cuda_generator = torch.cuda.get_rng_state(self._device) if is_cuda else None
        generator = torch.get_rng_state()
        buffers = self._buffers.snapshot()
        self._now = None

        def restore() -> None:
            self._now = now
            self._sum.leaves = leaves
            torch.set_rng_state(generator)
            if cuda_generator is not None:
                torch.cuda.set_rng_state(cuda_generator, self._device)
            self._buffers.restore(buffers)

        return restore
