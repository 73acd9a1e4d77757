"""The elementary functions of portable arithmetic in Python's floats, written from docs/portable.md.

Python's operators are those of IEEE 754, and round once. Coefficients are those of `functions.py`, as the page says.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from samebits.portable import functions

NAN, INF = math.nan, math.inf
LN2, LN2_REST = functions._LN2, functions._LN2_REST


def poly(x: float, coefficients: Sequence[float]) -> float:
    result = x * coefficients[-1]
    for each in coefficients[-2:0:-1]:
        result = (result + each) * x
    return result + coefficients[0]


def exp(x: float) -> float:
    if math.isnan(x):
        return NAN
    x = max(-708.2, min(709.79, x))
    k = x * functions._LOG2_E + 1.5 * 2.0**52 - 1.5 * 2.0**52  # to a whole number, half to even
    rest = x - k * LN2 - k * LN2_REST
    # At the lower limit the exponent's bits are 0, which is the number 0.
    scale = 2.0 ** (k - 1) if k > -1022 else 0.0
    return poly(rest, functions._TWICE_EXP) * scale


def log(x: float) -> float:
    if x == 0 or not math.isfinite(x) or x < 0:
        return -INF if x == 0 else x if x > 0 or math.isnan(x) else NAN
    mantissa, exponent = math.frexp(x)
    mantissa, exponent = 2 * mantissa, exponent - 1
    if mantissa > math.sqrt(2):
        mantissa, exponent = mantissa / 2, exponent + 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return poly(s * s, functions._LOG) * s * 2.0 + exponent * LN2_REST + exponent * LN2


def log1p(x: float) -> float:
    return x - x * x / 2.0 + x * x * x / 3.0 if abs(x) < 2.0**-12 else log(1.0 + x)


def expm1(x: float) -> float:
    return x + x * x / 2.0 + x * x * x / 6.0 if abs(x) < 2.0**-12 else exp(x) - 1.0


def tanh(x: float) -> float:
    if abs(x) < 2.0**-12:
        return x - x * x * x / 3.0
    e = exp(abs(x) * -2.0)
    return math.copysign((1.0 - e) / (e + 1.0), x)


def softplus(x: float) -> float:
    return log1p(exp(-abs(x))) + (NAN if math.isnan(x) else max(x, 0.0))


def erf(x: float) -> float:
    x = x if math.isnan(x) else max(-4.0, min(4.0, x))
    return poly(x * x, functions._ERF) * x


def normal(x: float) -> float:
    return erf(x * math.sqrt(0.5)) * 0.5 + 0.5


def gelu_slope(x: float) -> float:
    return exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi)) * x + normal(x)


def sine(x: float, quarter: int) -> float:
    if not abs(x) < 2.0**20:
        return NAN
    k = math.copysign(float(round(x * (2.0 / math.pi))), x)  # of -0, -0: so the sine of -0 is +0
    rest = x
    for part in functions._HALF_PI:
        rest = rest - k * part
    quadrant = int(k) + quarter
    square = rest * rest
    value = poly(square, functions.COS) if quadrant % 2 else poly(square, functions.SIN) * rest
    return -value if quadrant & 2 else value


def sqrt(x: float) -> float:
    return math.sqrt(x) if x >= 0 else NAN


def rsqrt(x: float) -> float:
    root = float(np.float32(sqrt(x)))
    return math.copysign(INF, root) if root == 0 else 1.0 / root


FUNCTIONS: dict[str, Callable[[float], float]] = {
    "exp": exp, "log": log, "log1p": log1p, "expm1": expm1, "tanh": tanh, "softplus": softplus, "erf": erf,
    "sigmoid": lambda x: 1.0 / (exp(-x) + 1.0), "gelu": lambda x: normal(x) * x, "gelu_slope": gelu_slope,
    "sin": lambda x: sine(x, 0), "cos": lambda x: sine(x, 1), "sqrt": sqrt, "rsqrt": rsqrt,
}  # fmt: skip
