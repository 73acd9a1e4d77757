"""Products of matrices in integers, by whichever unit of the processor is faster.

Both factors are integers of `grid.BITS` bits. Their products are added without rounding:

    float64   q times q                        8,192 products of 40 bits are below 2**53
    int8      three digits of base 256 each    nine products of digits by int8 units (VNNI, AMX, CUDA), sums in int32

Both give the same integers, so the choice changes no bit. It is measured once in a process, after a test that the int8
unit is exact here: without VNNI, 8-bit instructions of x86-64 saturate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from samebits.portable.grid import BITS, ROUNDING, grid, scaled

BLOCK = 1 << (53 - 2 * BITS)  # products that float64 adds without rounding
# Adding ROUNDING to an integer q leaves it in the low bits of the float32: 0x4B400000 + q.
_OFFSET = 0x4B40_0000
# q + 0x808080 has the three digits, each with 128 added; the exclusive or takes it away again.
_DIGITS = 0x80_8080
_CHUNK = 1 << 17  # values that stay in a processor's cache
_ROWS = 32  # that a unit multiplies at least
# units, named by the number of digits of a factor
INT8 = 3
FLOAT64 = 1


def digit_type(unit: int) -> torch.dtype:
    """Return the type of the digits that a unit multiplies."""
    return torch.int8 if unit == INT8 else torch.float64


def write_digits(x: Tensor, up: Tensor, unit: int, digits: Sequence[Tensor]) -> None:
    """Round x * up to integers of at most BITS bits, and write their digits, lowest first.

    Args:
        x: Any shape, float32.
        up: Powers of two, of `grid.grid`.
        unit: INT8 or FLOAT64, the number of digits.
        digits: Of `digit_type`, in the shape of `x` and in any layout.
    """
    step = max(1, _CHUNK * len(x) // max(x.numel(), 1))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        q = x[rows] * (up if len(up) == 1 else up[rows])
        if unit == FLOAT64:
            digits[0][rows] = q.round_()
            continue
        bits = q.add_(ROUNDING).view(torch.int32).sub_(_OFFSET - _DIGITS).bitwise_xor_(_DIGITS)
        for digit in digits:
            digit[rows] = bits  # its lowest eight bits
            bits.bitwise_right_shift_(8)


def choose_unit(m: int, k: int, n: int, device: torch.device) -> int:
    """Return the unit for products of (m, k) and (k, n), any shape.

    Args:
        m: Rows of the left factor.
        k: Terms of a sum.
        n: Columns of the right factor.
        device: Of the factors.
    """
    # Below, passes over digits and results cost more than products save; CUDA's kernels have minimal sizes too.
    if k < 512 or n < 8 or m < 17 or m * k * n < 1 << 20 or n % 8 or k % 8:
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
    factors = [
        (ramp * 7 % 256 - 128, (ramp * 11 % 256 - 128).T),
        (ramp * 0 - 128, (ramp * 0 - 128).T),
        (ramp % 2 * 255 - 128, ramp.T * 0 + 127),
    ]
    try:
        return all(
            torch.equal(torch._int_mm(a.char(), b.char()).double(), a.double() @ b.double())
            for a, b in factors
        )
    except RuntimeError:  # no kernel for this device
        return False


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
        a: (..., m, digits, k) of `write_digits`.
        b: (..., digits, k, n) of `write_digits`, digits in reversed order.

    Returns:
        (..., m, n) float64: the sums of integers; if k > BLOCK, rounded once.
    """
    return sum_of_products([(a, b)], a.shape[-1])


def sum_of_products(factors: Iterable[tuple[Tensor, Tensor]], k: int) -> Tensor:
    """Add `product` of pairs of factors, (..., m, digits, k_i) and (..., digits, k_i, n), of k terms together.

    Returns:
        (..., m, n) float64, as `product` does.
    """
    total: Tensor | None = None
    block: Tensor | None = None
    terms = 0  # of the block
    for a, b in factors:
        for start in range(0, a.shape[-1], BLOCK):
            left, right = a[..., start : start + BLOCK], b[..., start : start + BLOCK, :]
            terms += left.shape[-1]
            if block is not None and terms > BLOCK:
                # Sums of blocks may need more than 53 bits, so they are added in int64.
                total = block.long() if total is None else total.add_(block.long())
                block, terms = None, left.shape[-1]
            block = _add_product(block, left, right)
    assert block is not None
    # The sum of products that are all -0 is -0 or +0, by library; adding 0 makes it +0.
    return block.add_(0.0) if total is None else total.add_(block.long()).double()


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add the product of encoded factors to sums, in place."""
    if a.dtype == torch.float64:
        a, b = a.squeeze(-2), b.squeeze(-3)
        if total is None:
            return torch.matmul(a, b)
        return total.addmm_(a, b) if a.dim() == 2 else total.baddbmm_(a, b)
    product = _of_int8(a, b)
    return product if total is None else total.add_(product)


def _of_int8(a: Tensor, b: Tensor) -> Tensor:
    k, n = b.shape[-2:]
    # [a0 a1 a2] and [b2; b1; b0]
    a, b, size = a.reshape(-1, INT8 * k), b.reshape(INT8 * k, n), (*a.shape[:-2], n)
    step = max(_ROWS, _CHUNK // n) if a.device.type == "cpu" else len(a)
    with int8_kernels():
        parts = [_of_digits(a[i : i + step], b, k) for i in range(0, len(a), step)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(size)


def _of_digits(a: Tensor, b: Tensor, k: int) -> Tensor:
    # The products of equal power stand side by side: a0 b2 + a1 b1 + a2 b0 is one product of 3 k terms.
    total = torch._int_mm(a[:, 2 * k :], b[:k]).double()
    for columns, rows in (
        (slice(k, None), slice(2 * k)),
        (slice(None), slice(None)),
        (slice(2 * k), slice(k, None)),
    ):
        total.mul_(256.0).add_(torch._int_mm(a[:, columns], b[rows]))
    return total.mul_(256.0).add_(torch._int_mm(a[:, :k], b[2 * k :]))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (..., m, k) and (..., k, n): each row of `a` and each column of `b` on a grid of its own.

    Factors of float64 are rounded to float32 first; the result has their type.
    """
    if a.dtype == torch.float64:
        return matmul(a.float(), b.float()).double()
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros(*a.shape[:-1], b.shape[-1])
    (a_up, row), (b_up, column) = grid(a, BITS, (-1,)), grid(b, BITS, (-2,))
    m, k = a.shape[-2:]
    n = b.shape[-1]
    unit = choose_unit(m, k, n, a.device) if a.dim() == 2 else FLOAT64
    left = a.new_empty(*a.shape[:-1], unit, k, dtype=digit_type(unit))
    write_digits(a, a_up, unit, left.unbind(-2))
    if b.stride(-2) == 1:  # columns are dense, as of transposed weights
        right = b.new_empty(*b.shape[:-2], n, unit, k, dtype=digit_type(unit)).movedim(-3, -1)
    else:
        right = b.new_empty(*b.shape[:-2], unit, k, n, dtype=digit_type(unit))
    write_digits(b, b_up, unit, right.unbind(-3)[::-1])
    return scaled(product(left, right), row, column).float()
