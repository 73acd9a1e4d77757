"""The bytes that a rank sends in a step, compared with a plan."""

from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.reduce import Reducer
from tests.ranks.networks import samples


class Planned(nn.Sequential):
    """Of one bucket that goes in chunks, or with a narrow middle in one piece."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, width), nn.ReLU(), nn.Linear(width, 5))


def bytes_of_a_step(world: World, width: int, order: Order, exact: bool) -> int:
    """Bytes that this rank hands to others for one step's gradients."""
    model, (inputs, labels) = Planned(width), samples(order.num_samples)
    sent = 0
    send = TreeAllReduce._send

    def count(self: TreeAllReduce, values: Tensor, peer: int, place: int) -> None:
        nonlocal sent
        sent += values.nbytes
        send(self, values, peer, place)

    with patch.object(tree_all_reduce.TreeAllReduce, "_send", count):
        reducer = Reducer(model, world, exact=exact)
        step = next(iter(order.steps(world, stop=1)))
        reducer.begin(step)
        for micro in step.micro_batches:
            with reducer.micro_batch(micro):
                reducer.backward(nn.functional.cross_entropy(model(inputs[micro.indices]), labels[micro.indices]))
        reducer.reduce()
    if world.size > 1:
        dist.barrier()
    return sent
