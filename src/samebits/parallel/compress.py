"""Buckets of a model's gradients, in 32 or in 16 bits.

16 bits: the gradient of each micro-batch is rounded, and so is every sum of two, within a process and between
processes. So sending rounds nothing further, and the sum is the same at any world size.
"""

from collections.abc import Sequence

import torch
from torch import nn

from samebits.cluster.world import World
from samebits.parallel.bucket import Bucket, group

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_buckets(
    parameters: Sequence[nn.Parameter], tail_length: int, world: World, compress: str, *, exact: bool, max_bytes: int
) -> list[Bucket]:
    """Make all buckets of a model, in the order in which they are sent. The last one has the tail.

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
