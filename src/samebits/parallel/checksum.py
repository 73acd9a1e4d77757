"""64-bit checksums of tensors that change with any of their bits, computed on the tensors' device.

Each value's bits are multiplied by an odd number of its own before they are added, so that no single change is lost.
The odd numbers look random: with evenly spaced ones such as (1, 3, 5, 7), changes in several positions would often
cancel. Sums of integers do not depend on their order.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

_PIECE = 1 << 18  # number of values that fit into the CPU cache together
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensor: Tensor) -> Tensor:
    """Compute the checksum of a tensor of any shape and type, () int64 on its device: reading it waits for that."""
    values = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    weights = _odd_numbers(_PIECE, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        # All pieces have the same weights. The factor distinguishes them, so two that
        # change places are found. Sums that overflow wrap around, equally on all devices.
        total = 3 * total + (piece.to(torch.int64) * weights[: len(piece)]).sum()
    return total


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Compute the checksum of each tensor. Tensors have any shape. Returns the checksums, by name."""
    sums = [checksum(tensor) for tensor in tensors.values()]
    numbers: list[int] = []
    if sums:
        # One transfer for all: on a GPU, each one waits for the device. An optimizer may keep some on the host.
        device = max((total.device for total in sums), key=lambda device: device.type == "cuda")
        numbers = torch.stack([total.to(device) for total in sums]).tolist()
    return dict(zip(tensors, numbers, strict=True))


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return odd int64 numbers that look random and are always the same (constants and shifts of splitmix64)."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1
