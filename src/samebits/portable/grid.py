"""Numbers on a common power-of-two grid, and sums of them that no order changes.

A sum is the same in every order if no addition rounds. Values become integers times one power of two, so few bits that
every partial sum is an integer below 2**53, which float64 holds. Then no library, vector width, thread count or device
can change the result, and any of them may compute it. `docs/portable.md` defines each number exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 20  # of a factor of a product: 8,192 products of two such integers are below 2**53
SUM_BITS = 40  # of a term of a sum, at most; fewer where more than 8,192 terms are added
# 1.5 * 2**23: a float32 near it has a last place of 1, so adding it rounds to an integer, half to even.
ROUNDING = 12_582_912.0
_FEW = 32  # channels
_CHUNK = 1 << 16  # values that stay in a processor's cache in float64

_EXPONENT = {
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


def grid(x: Tensor, bits: int, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the powers of two between values and integers of at most `bits` bits.

    Args:
        x: Any shape, float32 or float64.
        bits: |x * up| is at most 2**bits.
        dims: Dimensions that share a power.

    Returns:
        `up` and `down` = 1 / up, with size 1 in `dims`. Where a value is infinite or NaN, `down` is NaN.
    """
    return _powers(_largest(x, dims), bits)


def _largest(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The largest magnitudes, with size 1 in `dims`. A maximum has no order."""
    if x.dim() > 2 and len(dims) == x.dim() - 1 and 1 not in dims and x.shape[1] < _FEW:
        pixels = x.movedim(1, -1)
        if (
            pixels.is_contiguous()
        ):  # torch is up to 27 times slower at few columns: as rows of several pixels
            rows = pixels.view(-1, math.gcd(x.numel() // x.shape[1], _FEW), x.shape[1])
            return _largest(rows, (0,)).amax(1).view(1, -1, *[1] * (x.dim() - 2))
    # torch is slow at several dimensions at once with the first among them, and at a copy without signs.
    inner = tuple(dim for dim in dims if dim != 0) or tuple(dims)
    largest = torch.maximum(x.amax(inner, keepdim=True), -x.amin(inner, keepdim=True))
    return largest.amax(0, keepdim=True) if len(inner) < len(dims) else largest


def _powers(largest: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`grid`, from the largest magnitudes."""
    integer, mask = _EXPONENT[largest.dtype]
    # power <= largest < 2 * power. Both powers have to be normal numbers, so a smaller maximum counts as this large.
    power = (
        (largest.view(integer) & mask)
        .view(largest.dtype)
        .clamp_(min=torch.finfo(largest.dtype).tiny * 2.0**bits)
    )
    # Both are powers of two, so the division is exact. largest - largest is 0, or NaN if it is not finite.
    return 2.0 ** (bits - 1) / power, (power * 2.0 ** (1 - bits)).add_(largest - largest)


def over(x: Tensor, divisor: float | Tensor) -> Tensor:
    """x / divisor of any shape, rounded once: torch's CUDA kernel for a number multiplies by its reciprocal."""
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=x.dtype, device=x.device)
    return x / divisor


def scaled(sums: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Multiply float64 sums of any shape by powers of two, in place and exactly: float64 has room for both."""
    return sums.mul_(left.double()).mul_(right.double())


def num_bits(num_terms: int) -> int:
    """Return the bits of the terms of a sum, so that the sum of their integers is at most 2**53."""
    return min(SUM_BITS, 53 - max(num_terms - 1, 1).bit_length())


def exact_sum(x: Tensor, dims: Sequence[int], *, keepdim: bool = False) -> Tensor:
    """Sum over dimensions in an arithmetic that no order changes.

    Args:
        x: Any shape, float32 or float64.
        dims: Dimensions to sum over.
        keepdim: Whether they stay, with size 1.

    Returns:
        float64. Infinite or NaN terms give NaN.
    """
    dims = tuple(dims) if x.dim() else ()  # torch lets dimension 0 of a single value be named
    terms = math.prod(x.shape[dim] for dim in dims)
    if not dims or terms == 1:
        total = x.double()
    elif not x.numel():
        total = x.double().sum(dims, keepdim=True)
    else:
        up, down = grid(x, num_bits(terms), dims)
        total = (x * up).round_().double().sum(dims, keepdim=True) * down.double()
    return total if keepdim else total.squeeze(dims)


def sum_of_squares(x: Tensor) -> Tensor:
    """`exact_sum` of the squares of all values of any shape, a few at a time: they stay in the processor's cache."""
    if x.numel() < 2:
        return exact_sum(x.double() * x.double(), range(x.dim()))
    largest = _largest(x, range(x.dim())).double()
    up, down = (each.view(()) for each in _powers(largest * largest, num_bits(x.numel())))
    total = torch.zeros_like(down)
    for part in x.split(max(1, _CHUNK * len(x) // x.numel())):
        wide = part.double()
        total += (wide * wide).mul_(up).round_().sum()
    return total * down
