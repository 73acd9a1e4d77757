"""Which rank owns which tensor of a sharded model in exact mode.

A tensor is never split: torch's fused SGD rounds the last values of a tensor, which do not fill a vector, differently
from the rest, so an update has the same bits at any world size only if each tensor is updated as a whole.
"""

import heapq
from collections.abc import Sequence


def assign_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assign tensors to ranks, so that the ranks own about equally many values.

    Largest tensors first, each to the rank with the fewest values so far; the lowest such rank, so that all ranks
    compute the same. No rank owns more than an even share and one largest tensor.

    Returns:
        The owner of each tensor.
    """
    owners = [0] * len(sizes)
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], owner))
        owners[index] = owner
    return owners
