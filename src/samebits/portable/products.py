"""Products of matrices in integers, by whichever unit of the processor is faster.

Both factors are integers of `grid.BITS` bits. Their products are added without rounding:

    float64   q times q                        8,192 products of 40 bits are below 2**53
    int8      three digits of base 256 each    nine products of digits by int8 units (VNNI, AMX, CUDA), sums in int32

Both give the same integers, so the choice changes no bit. It is measured once in a process, after a test that the int8
unit is exact here: without VNNI, 8-bit instructions of x86-64 saturate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from samebits.portable.grid import BITS, ROUNDING, integers

BLOCK = 1 << (53 - 2 * BITS)  # products that float64 adds without rounding
# Adding ROUNDING to an integer q leaves it in the low bits of the float32: 0x4B400000 + q.
_OFFSET = 0x4B40_0000
# q + 0x808080 has the three digits, each with 128 added; the exclusive or takes it away again.
_DIGITS = 0x80_8080
INT8, FLOAT64 = 3, 1  # units, named by the number of digits of a factor


def encode(q: Tensor, unit: int) -> Tensor:
    """Return integers as what a unit multiplies: (digits, ...) int8, lowest first, or (1, ...) float64.

    Args:
        q: Any shape, float32 integers of at most BITS bits.
        unit: INT8 or FLOAT64.
    """
    if unit == FLOAT64:
        return q.double().unsqueeze(0)
    bits = (q + ROUNDING).view(torch.int32).sub_(_OFFSET - _DIGITS).bitwise_xor_(_DIGITS)
    # Little-endian: the last of the four bytes is no digit.
    return bits.contiguous().view(torch.int8).view(*q.shape, 4).movedim(-1, 0)[:INT8]


def choose_unit(m: int, k: int, n: int, device: torch.device) -> int:
    """Return the unit for products of (m, k) and (k, n), any shape.

    Args:
        m: Rows of the left factor.
        k: Terms of a sum.
        n: Columns of the right factor.
        device: Of the factors.
    """
    # Below, the passes over digits cost more than they save; oneDNN's and CUDA's kernels have minimal sizes too.
    if k < 32 or n < 8 or m < 17 or m * k * n < 1 << 20 or n % 8 or k % 8:
        return FLOAT64
    return INT8 if _int8_is_faster(device.type) else FLOAT64


@cache
def _int8_is_faster(device: str) -> bool:
    with int8_kernels():
        return _is_exact(device) and _is_faster(device)


def _is_faster(device: str) -> bool:
    a, b = (torch.ones(512, 512, dtype=torch.int8, device=device) for _ in range(2))
    return 9 * _seconds(torch._int_mm, a, b) < _seconds(torch.mm, a.double(), b.double())


@contextmanager
def int8_kernels() -> Iterator[None]:
    """Let torch use oneDNN, which has the int8 kernels. Elsewhere it is off: oneDNN's LSTM is one operation."""
    was_on = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_on)


def _is_exact(device: str) -> bool:
    """Whether this processor's int8 products are exact, also for the largest digits, whose sums may saturate."""
    ramp = torch.arange(64 * 96, device=device).view(64, 96)
    factors = [(ramp * 7 % 256 - 128, (ramp * 11 % 256 - 128).T), (ramp * 0 - 128, (ramp * 0 - 128).T)]
    factors.append((ramp % 2 * 255 - 128, ramp.T * 0 + 127))
    try:
        return all(torch.equal(torch._int_mm(a.char(), b.char()).long(), _slow(a, b)) for a, b in factors)
    except RuntimeError:  # no kernel for this device
        return False


def _slow(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).long()


def _seconds(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    times = []
    for _ in range(4):
        start = time.perf_counter()
        multiply(a, b).flatten()[0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return min(times)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply encoded factors.

    Args:
        a: (..., m, digits, k) of `encode`, digits moved beside k.
        b: (..., digits, k, n) of `encode`, digits in reversed order.

    Returns:
        (..., m, n) float64: the sums of integers; if k > BLOCK, rounded once.
    """
    k = a.shape[-1]
    if k <= BLOCK:
        return _exact(a, b)
    # Sums of blocks may need more than 53 bits, so they are added in int64.
    total: Tensor | None = None
    for start in range(0, k, BLOCK):
        part = _exact(a[..., start : start + BLOCK], b[..., start : start + BLOCK, :]).long()
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.double()


def _exact(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float64:
        # The sum of products that are all -0 is -0 or +0, by library; adding 0 makes it +0.
        return torch.matmul(a.squeeze(-2), b.squeeze(-3)).add_(0.0)
    m, _, k = a.shape
    n = b.shape[-1]
    a, b = a.reshape(m, INT8 * k), b.reshape(INT8 * k, n)  # [a0 a1 a2] and [b2; b1; b0]
    with int8_kernels():
        return _of_digits(a, b, k)


def _of_digits(a: Tensor, b: Tensor, k: int) -> Tensor:
    # The products of equal power stand side by side: a0 b2 + a1 b1 + a2 b0 is one product of 3 k terms.
    total = torch._int_mm(a[:, 2 * k :], b[:k]).double()
    for columns, rows in ((slice(k, None), slice(2 * k)), (slice(None), slice(None)), (slice(2 * k), slice(k, None))):
        total = torch.add(torch._int_mm(a[:, columns], b[rows]), total, alpha=256.0)
    return torch.add(torch._int_mm(a[:, :k], b[2 * k :]), total, alpha=256.0)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (..., m, k) and (..., k, n), float32: each row of `a` and each column of `b` on a grid of its own.

    Raises:
        NotImplementedError: They have another type.
    """
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise NotImplementedError
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros(*a.shape[:-1], b.shape[-1])
    (qa, row), (qb, column) = integers(a, (-1,)), integers(b, (-2,))
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    unit = choose_unit(m, k, n, a.device) if a.dim() == 2 else FLOAT64
    left = encode(qa, unit).movedim(0, -2)
    right = encode(qb, unit).flip(0).movedim(0, -3) if unit == INT8 else encode(qb, unit).movedim(0, -3)
    return product(left, right).float().mul_(row).mul_(column)
