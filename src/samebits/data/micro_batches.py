"""Number of micro-batches, and those of each rank. Imports no torch, so commands can use it before torch is loaded."""

from functools import lru_cache
from itertools import count


def num_micro_batches(num_samples: int, micro_batch: int) -> int:
    """Return the fewest micro-batches of at most `micro_batch` samples that hold `num_samples`."""
    return -(-num_samples // micro_batch)


def smallest_micro_batch(num_samples: int, global_batch: int, micro_batch: int) -> int:
    """Return the number of samples in the smallest micro-batch of an epoch, whose last step has the rest."""
    steps = {min(global_batch, num_samples), num_samples % global_batch or global_batch}
    return min(step // num_micro_batches(step, micro_batch) for step in steps)


def two_or_more(num_samples: int, global_batch: int, micro_batch: int) -> str:
    """Return the nearest settings without a micro-batch of one sample, as a fix."""
    if num_samples < 2:
        return "Add training samples."
    # With micro_batch=3 or more, only a step of one sample has such a micro-batch.
    for wide in count(global_batch):
        for least in range(micro_batch, min(wide, max(micro_batch, 3)) + 1):
            if smallest_micro_batch(num_samples, wide, least) > 1:
                chosen = (
                    f"global_batch={wide}" * (wide != global_batch),
                    f"micro_batch={least}" * (least != micro_batch),
                )
                return f"Set {' '.join(filter(None, chosen))}."
    raise AssertionError


def part(start: int, stop: int, num_parts: int, index: int) -> tuple[int, int]:
    """Split [start, stop) into parts whose lengths differ by at most one, longer first; return (first, stop) of one."""
    size, longer = divmod(stop - start, num_parts)
    first = start + index * size + min(index, longer)
    return first, first + size + (index < longer)


@lru_cache(16)  # the steps of a run differ in two sizes at most, and each asks for the shares of all ranks
def even_shares(num_micro_batches: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches [first, last) of each rank."""
    return tuple(part(0, num_micro_batches, world_size, rank) for rank in range(world_size))


class Alone:
    """The place of the only rank of a world of one, which has all micro-batches of a step."""

    rank, size, machines = 0, 1, (0,)
