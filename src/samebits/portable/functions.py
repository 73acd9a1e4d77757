"""Elementary functions made of IEEE operations: exp, log, tanh, sigmoid, erf, sine, cosine, square root, power.

Every library has its own versions, with other last bits. These compute in float64 by additions, multiplications and
divisions, each a kernel of its own, and are rounded to the type of their argument at the end. Their error is below
1e-9, far less than float32's 6e-8. Arguments are those of torch's operations (ATen), of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor

from samebits.portable.grid import over

# A float64 of 32,768 values stays in a processor's cache through all operations of a function.
_CHUNK = 1 << 15
# ln 2 in two parts; the first has 32 bits, so its product with a small integer is exact.
_LN2 = 6.93147180369123816490e-01
_LN2_REST = 1.90821492927058770002e-10
_LOG2_E = 1.44269504088896338700
_ROUNDING = 1.5 * 2.0**52
# Both interpolated at Chebyshev points: 2 e**x by (e**x - 1) / x on |x| <= ln 2 / 2, 1e-10 of e**x ...
_TWICE_EXP = (
    2.0, 2.0, 1.0000000094235515, 0.33333333437995016, 0.08333270579355032, 0.016666596967509772,
    0.002788221686794535, 0.0003979854791729872,
)  # fmt: skip
# ... and erf(x) / x in x * x on |x| <= 4, 4e-10.
_ERF = (
    1.1283791668944105, -0.37612637994416254, 0.11283784806429992, -0.026865963750455343, 0.005223646149613631,
    -0.0008545065101948847, 0.0001203383996463952, -1.4825297167592423e-05, 1.6116703597671405e-06,
    -1.546381394408387e-07, 1.2980389195573635e-08, -9.37064885712255e-10, 5.6823739391549953e-11,
    -2.8122359092737115e-12, 1.0968599972908687e-13, -3.221478427940935e-15, 6.66142222231235e-17,
    -8.611370426755082e-19, 5.220164524238099e-21,
)  # fmt: skip
_LOG = [1 / n for n in range(1, 20, 2)]  # of 2 artanh s on |s| < 0.172: 1e-16
SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(8)]  # on |x| <= pi / 4: 6e-17
COS = [(-1) ** n / math.factorial(2 * n) for n in range(9)]
# pi / 2 in three parts of 33 bits each and a rest: products with integers below 2**20 are exact.
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21)


def poly(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Evaluate a polynomial of any shape, lowest coefficient first. In place: no product and sum become one kernel."""
    result = x * coefficients[-1]
    for each in coefficients[-2:0:-1]:
        result.add_(each).mul_(x)
    return result.add_(coefficients[0])


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Compute in float64 in chunks, and round to the argument's type."""

    @wraps(function)
    def compute(x: Tensor) -> Tensor:
        if x.numel() <= _CHUNK:
            return function(x.double()).to(x.dtype)
        result = torch.empty_like(x)
        step = max(1, _CHUNK * len(x) // x.numel())
        for start in range(0, len(x), step):
            result[start : start + step] = function(x[start : start + step].double())
        return result

    return compute


def exp64(x: Tensor) -> Tensor:
    """e**x of float64; below -708, where it would be denormal, 0. Of NaN, NaN."""
    # The limits are infinity and 0: e**709.79 overflows, and at -708.2 the exponent's bits below are those of 0.
    x = x.clamp(-708.2, 709.79)
    # Adding 1.5 * 2**52 rounds to a whole number and leaves it in the low bits.
    shifted = (x * _LOG2_E).add_(_ROUNDING)
    k = shifted - _ROUNDING
    rest = x.sub_(k * _LN2).sub_(k.mul_(_LN2_REST))
    # Twice e**rest times 2**(k - 1), since 2**1024 is no number, though e**709.7 is one.
    return poly(rest, _TWICE_EXP).mul_(
        (shifted.view(torch.int64) << 52).add_(1022 << 52).view(torch.float64)
    )


def log64(x: Tensor) -> Tensor:
    """Natural logarithm of float64, normal numbers; of 0 -infinity, below 0 NaN."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0x000F_FFFF_FFFF_FFFF) | 0x3FF0_0000_0000_0000).view(torch.float64)
    is_large = mantissa > math.sqrt(2)
    mantissa = torch.where(is_large, mantissa * 0.5, mantissa)
    exponent = (exponent + is_large).double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    result = (poly(s * s, _LOG).mul_(s).mul_(2.0)).add_(exponent * _LN2_REST).add_(exponent * _LN2)
    result = torch.where(x == 0, -math.inf, torch.where(x < 0, math.nan, result))
    return torch.where(x.isfinite(), result, torch.where(x == -math.inf, math.nan, x))


def sqrt(x: Tensor) -> Tensor:
    """Square root: float64's rounded to float32 is correctly rounded, even if float64's is not."""
    return _sqrt64(x) if x.dtype == torch.float64 else x.double().sqrt_().to(x.dtype)


def _sqrt64(x: Tensor) -> Tensor:
    """Square root of float64, which libraries round differently: two steps of Heron from the root of float32."""
    mantissa, exponent = torch.frexp(x)
    odd = exponent & 1
    mantissa = torch.where(odd == 1, mantissa * 0.5, mantissa)  # from 1/4 to 1, times a power of 4
    root = mantissa.float().double().sqrt_().float().double()
    for _ in range(2):
        root = (root + mantissa / root) * 0.5
    scale = (((exponent + odd).long() >> 1) + 1023 << 52).view(torch.float64)
    return torch.where((x > 0) & x.isfinite(), root * scale, torch.where(x < 0, math.nan, x))


def rsqrt(x: Tensor) -> Tensor:
    """1 / `sqrt`."""
    return (1.0 / sqrt(x).double()).to(x.dtype)


exp = _elementwise(exp64)
log = _elementwise(log64)


@_elementwise
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e**-x)."""
    return 1.0 / (exp64(-x).add_(1.0))


@_elementwise
def tanh(x: Tensor) -> Tensor:
    """(1 - e**-2|x|) / (1 + e**-2|x|), with the sign of x; near 0 x - x**3 / 3."""
    e = exp64(x.abs().mul_(-2.0))
    result = torch.copysign((1.0 - e) / (e + 1.0), x)
    return torch.where(x.abs() < 2.0**-12, x - over(x * x * x, 3.0), result)


def log1p64(x: Tensor) -> Tensor:
    """log(1 + x) of float64; near 0 by its series."""
    return torch.where(x.abs() < 2.0**-12, x - x * x * 0.5 + over(x * x * x, 3.0), log64(1.0 + x))


log1p = _elementwise(log1p64)


@_elementwise
def expm1(x: Tensor) -> Tensor:
    """e**x - 1; near 0 by its series."""
    return torch.where(x.abs() < 2.0**-12, x + x * x * 0.5 + over(x * x * x, 6.0), exp64(x) - 1.0)


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """log(e**x + e**y); where both are -infinity, -infinity."""
    top = torch.maximum(x, y)
    low = torch.minimum(x, y)
    apart = (low - top).nan_to_num(0.0, neginf=-150.0).double()  # inf - inf is NaN
    return (log1p64(exp64(apart)) + top).to(x.dtype)


@_elementwise
def softplus(x: Tensor) -> Tensor:
    """log(1 + e**x)."""
    return log1p64(exp64(-x.abs())).add_(x.clamp(min=0.0))


def erf64(x: Tensor) -> Tensor:
    """Error function of float64; beyond 4 it is 1 - 1.5e-8, which rounds to 1 in float32."""
    x = x.clamp(-4.0, 4.0)
    return poly(x * x, _ERF).mul_(x)


def _normal(x: Tensor) -> Tensor:
    """Cumulative of the normal distribution."""
    return erf64(x * math.sqrt(0.5)).mul_(0.5).add_(0.5)


@_elementwise
def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's cumulative."""
    return _normal(x).mul_(x)


@_elementwise
def gelu_slope(x: Tensor) -> Tensor:
    """Derivative of `gelu`."""
    density = exp64((x * x).mul_(-0.5)).mul_(1 / math.sqrt(2 * math.pi))
    return density.mul_(x).add_(_normal(x))


erf = _elementwise(erf64)


def _sin_cos(x: Tensor, quarter: int) -> Tensor:
    k = torch.round(x * (2.0 / math.pi))
    rest = x
    for part in _HALF_PI:
        rest = rest - k * part
    square = rest * rest
    quadrant = (k.nan_to_num(0.0, 0.0, 0.0).long() + quarter) & 3
    value = torch.where((quadrant & 1).bool(), poly(square, COS), poly(square, SIN).mul_(rest))
    value = torch.where((quadrant & 2).bool(), -value, value)
    # Beyond, products with the parts of pi / 2 round: no radian of a network is that large.
    return torch.where(x.abs() < 2.0**20, value, math.nan)


@_elementwise
def sin(x: Tensor) -> Tensor:
    """Sine of |x| < 2**20, else NaN."""
    return _sin_cos(x, 0)


@_elementwise
def cos(x: Tensor) -> Tensor:
    """Cosine of |x| < 2**20, else NaN."""
    return _sin_cos(x, 1)


def power(x: Tensor | float, exponent: float | Tensor) -> Tensor:
    """x**exponent: by products for 2, 3, -1, -2, by `sqrt` for 0.5; else e**(exponent log |x|), with the sign of x if
    the exponent is odd; of x below 0 and an exponent that is not whole, NaN."""
    if isinstance(exponent, Tensor):
        wide = torch.as_tensor(x, dtype=torch.float64, device=exponent.device)
        dtype = torch.result_type(x, exponent) if isinstance(x, Tensor) else exponent.dtype
        return _power64(wide, exponent.double()).to(dtype)
    assert isinstance(x, Tensor)
    products: dict[float, Callable[[], Tensor]] = {
        1.0: x.clone,
        2.0: lambda: x * x,
        3.0: lambda: x * x * x,
        -1.0: lambda: 1.0 / x,
        -2.0: lambda: 1.0 / (x * x),
        0.5: lambda: sqrt(x),
        -0.5: lambda: rsqrt(x),
    }
    if exponent in products:
        return products[exponent]()
    return _elementwise(lambda part: _power64(part, torch.full((), exponent, dtype=torch.float64)))(
        x
    )


def _power64(x: Tensor, exponent: Tensor) -> Tensor:
    size = exp64(log64(x.abs()) * exponent)
    rest = torch.fmod(exponent.abs(), 2.0)  # 0: even; 1: odd; else not whole
    negative = torch.where(rest == 0.0, size, torch.where(rest == 1.0, -size, math.nan))
    # 0 * log 0 and 0 * log infinity are NaN, but each number to the power of 0 is 1.
    return torch.where(exponent == 0.0, 1.0, torch.where(x < 0.0, negative, size))
