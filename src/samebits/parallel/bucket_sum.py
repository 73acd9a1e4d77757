"""Buckets summed over a step's micro-batches and all ranks: under the engine's reducer, and under own loops.

start_step                    before the step's first micro-batch
  start_leaves                before a micro-batch's backward pass
    (hooks fill the leaves)
  end_leaf                    for each bucket: the leaf enters the tree; in the last micro-batch, complete buckets
                              are sent while backward continues; between machines, threads do all the rest
start_all, finish             after the last micro-batch's backward pass: every rank has the same sums
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.order import Step
from samebits.parallel.bucket import Bucket, Flat, Leaf
from samebits.parallel.exchange.in_threads import ExchangeThreads, are_worth_threads
from samebits.parallel.exchange.tags import bucket_tag
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.tree import Node, rank_nodes

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
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
        self, parts: Sequence[Bucket], memory: Bucket, world: World, nodes: list[list[Node]], tag: int
    ) -> None:
        self._parts, self._memory = parts, memory
        self._length = sum(part.length for part in parts)
        memory.start_step(())
        memory.nodes = [(node, memory.flat()) for node, _ in parts[0].nodes]
        self._all_reduce = TreeAllReduce(memory, world, nodes, tag)

    def start(self) -> None:
        """Send copies of this rank's nodes."""
        for (_, flat), *own in zip(self._memory.nodes, *(part.nodes for part in self._parts), strict=True):
            # Copies: the buckets have memory of their own, and one message needs it in one piece.
            torch.cat([each.values for _, each in own], out=flat.values[: self._length])
        self._all_reduce.start()

    def advance(self) -> bool:
        """See `TreeAllReduce.advance`. Copies complete sums into the buckets."""
        if not self._all_reduce.advance():
            return False
        assert self._memory.result is not None
        sums = self._memory.result.values[: self._length].split([part.length for part in self._parts])
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
        self.buckets, self.world, self._number = list(buckets), world, number
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
        if self.buckets[0].exact:
            self.nodes = nodes_of(step)
        else:  # each rank has one node
            self.nodes = [[(mine[0], mine[-1] + 1)] if mine else [] for mine in step.leaves]
        self.exchanges, self.leaves, self._num_leaves = [], [], step.num_micro_batches
        rank, held = self.world.rank, step.division.held
        for bucket in self.buckets:
            bucket.start_step(step.leaves[rank], held[rank] if held else ())

    def start_leaves(self, index: int, *, is_alone: bool = False) -> None:
        """Start taking the gradients of a micro-batch, by its index in the step; see `Bucket.start_leaf`."""
        self.leaves = [bucket.start_leaf(index, self._num_leaves, is_alone=is_alone) for bucket in self.buckets]

    def used(self) -> Tensor:
        """Return for each parameter 1 if the micro-batch has its gradient, otherwise 0: (num_parameters,)."""
        used = torch.ones(self._num_parameters, device=self.buckets[0].device)
        position, missing = 0, list[int]()
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
            if self._threads is None and self.buckets[0].device.type == "cpu" and are_worth_threads(self.world):
                self._threads = ExchangeThreads()
            self._start_next()

    def end_threads(self) -> None:
        """Return when no thread uses the buckets any more: the step is complete, or its group has ended."""
        threads, self._threads = self._threads, None
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

    def gradients(self, results: Sequence[Flat], used: Iterable[float]) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
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
        bucket, tag = self.buckets[number], bucket_tag(number, self._number)
        exchange: TreeAllReduce | JoinedAllReduce
        if joined is None or number + 1 < len(self.buckets):
            exchange = TreeAllReduce(bucket, self.world, self.nodes, tag)
        else:
            if self._joined is None:
                self._joined = Bucket([], bucket.length + joined.length, self.world.size, True, bucket.device)
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


def make_buckets(
    parameters: Sequence[nn.Parameter], tail_length: int, world: World, compress: str, *, exact: bool, max_bytes: int
) -> list[Bucket]:
    """Make all buckets of a model, in the order in which they are sent. The last one has the tail.

    In 16 bits, the gradient of each micro-batch is rounded, and so is every sum of two, within a process and between
    processes. So sending rounds nothing further, and the sum is the same at any world size.

    Args:
        tail_length: Number of values summed beside the gradients, never in 16 bits.
        compress: "none", "bf16" or "fp16".
    """
    # The length of a bucket must not depend on a world whose size may change.
    device, size = parameters[0].device, world.size if world.membership is None else 1
    dtype = LOW_PRECISION.get(compress, torch.float32)
    groups = group(parameters, max_bytes)
    if compress in LOW_PRECISION:
        groups.append([])  # the tail's own bucket is never rounded
    buckets = [Bucket(group, 0, size, exact, device, dtype) for group in groups[:-1]]
    return [*buckets, Bucket(groups[-1], tail_length, size, exact, device)]
