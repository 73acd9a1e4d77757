"""All-reduces of a bucket on virtual ranks, and the sum that one process has."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from samebits.cluster.world import alone
from samebits.data.division import EVEN
from samebits.parallel.bucket import Bucket
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.exchange.part import bucket_tag, exchange_by_halving
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.tree import push, rank_nodes
from tests.unit.parallel.virtual_network import Network, SimulatedWorld

CPU = torch.device("cpu")


def leaves(num: int, length: int) -> list[Tensor]:
    """Values whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(num)
    return [torch.randn(length, generator=generator) * 10.0 ** (leaf % 7) for leaf in range(num)]


def total(values: list[Tensor]) -> Tensor:
    """Their sum in the brackets of the tree."""
    stack: list[tuple[tuple[int, int], Tensor]] = []
    for leaf, each in enumerate(values):
        push(stack, (leaf, leaf + 1), each, len(values), torch.add)
    ((_, found),) = stack
    return found


def world_of(rank: int, size: int, network: Network, machines: tuple[int, ...] = ()) -> SimulatedWorld:
    base = alone("cpu")
    return SimulatedWorld(
        rank, size, 0, CPU, "simulated", base.host, None, base.assignment, network=network, machines=machines
    )


def reduce(
    values: list[Tensor],
    size: int,
    *,
    machines: tuple[int, ...] = (),
    shares: Sequence[Sequence[int]] = (),
) -> tuple[list[Tensor], Network, set[bool]]:
    """The sums on all ranks of a world, what was sent, and whether ranks halved what they held."""
    coroutines = Coroutines(lambda: lambda: None)
    network = Network(size, lambda: coroutines.wait(True), machines)
    shares = shares or EVEN.leaves(len(values), size, machines)
    nodes = rank_nodes(tuple(shares), len(values))
    kinds: set[bool] = set()

    def run(rank: int) -> Tensor:
        bucket = Bucket([nn.Parameter(torch.empty(len(values[0])))], 0, 1, CPU)
        bucket.start_step(shares[rank])
        for leaf in shares[rank]:
            one = bucket.start_leaf(leaf, len(values))
            view = one.flat.views[0]
            view.add_(values[leaf]) if one.is_joining else view.copy_(values[leaf])
            one.missing.clear()
            bucket.end_leaf(one, len(values))
        exchange = TreeAllReduce(bucket, world_of(rank, size, network, machines), nodes, bucket_tag(3))
        kinds.add(exchange.way is exchange_by_halving)
        exchange.start()
        while not exchange.advance():
            pass
        return bucket.result.views[0].clone()

    found = coroutines.run([partial(run, rank) for rank in range(size)], lambda _: network.deliver())
    return found, network, kinds
