"""Elementary functions of Python floats, correctly rounded: learning rates and augmentation are part of the result.

`math.cos` and its like are the C library's, which differ between machines in their last bit. These compute in integers
of 160 bits after the point and round once. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

_BITS = 160
_ONE = 1 << _BITS


def _artanh(inverse: int) -> int:
    """Inverse hyperbolic tangent of 1 / inverse."""
    total = 0
    term = _ONE // inverse
    n = 1
    while term:
        total = total + term // n
        term = term // (inverse * inverse)
        n = n + 2
    return total


def _arctan(inverse: int) -> int:
    total = 0
    term = _ONE // inverse
    n = 1
    sign = 1
    while term:
        total = total + sign * (term // n)
        term = term // (inverse * inverse)
        n = n + 2
        sign = -sign
    return total


_LN2 = 2 * _artanh(3)
_HALF_PI = 2 * (4 * _arctan(5) - _arctan(239))  # Machin's formula
_TWO_BY_ROOT_PI = math.isqrt((2 << 3 * _BITS) // _HALF_PI)


def _fixed(x: float) -> int:
    numerator, denominator = x.as_integer_ratio()
    return (numerator << _BITS) // denominator


def _float(x: int) -> float:
    return x / _ONE  # Python rounds a quotient of integers correctly


def exp(x: float) -> float:
    """e**x."""
    if not math.isfinite(x) or abs(x) > 800:
        return x if x > 0 or math.isnan(x) else 0.0
    k, rest = divmod(_fixed(x), _LN2)
    total = 0
    term = _ONE
    n = 1
    while term:
        total = total + term
        term = term * rest // (n * _ONE)
        n = n + 1
    return math.ldexp(_float(total), k)


def log(x: float) -> float:
    """Natural logarithm of a positive number."""
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.75:  # otherwise the terms of x near 1 cancel
        mantissa = 2 * mantissa
        exponent = exponent - 1
    value = _fixed(mantissa)
    s = ((value - _ONE) << _BITS) // (value + _ONE)
    square = s * s >> _BITS
    total = 0
    term = s
    n = 1
    while abs(term) > 1:
        total = total + term // n
        term = term * square >> _BITS
        n = n + 2
    return _float(2 * total + exponent * _LN2)


def power(base: float, exponent: int) -> float:
    """base**exponent for a base from 0 to 1, to 45 decimal places."""
    result = _ONE
    factor = _fixed(base)
    while exponent:
        if exponent & 1:
            result = result * factor >> _BITS
        factor = factor * factor >> _BITS
        exponent = exponent >> 1
    return _float(result)


def cos(x: float) -> float:
    """Cosine of a finite number."""
    return _sine(_fixed(x) + _HALF_PI)


def sin(x: float) -> float:
    """Sine of a finite number."""
    return _sine(_fixed(x))


def _sine(x: int) -> float:
    quadrant, rest = divmod(x + _HALF_PI // 2, _HALF_PI)
    rest -= _HALF_PI // 2
    odd = quadrant & 1
    square = rest * rest >> _BITS
    total = 0
    term = _ONE if odd else rest
    n = 0 if odd else 1
    while abs(term) > 1:
        total = total + term
        term = -(term * square >> _BITS) // ((n + 1) * (n + 2))
        n = n + 2
    return _float(-total if quadrant & 2 else total)


def tan(x: float) -> float:
    """Tangent of a finite number: the quotient of `sin` and `cos`, each rounded."""
    return sin(x) / cos(x)


def erf(x: float) -> float:
    """Error function."""
    if abs(x) >= 6 or math.isnan(x):
        return x if math.isnan(x) else math.copysign(1.0, x)
    if (
        abs(x) < 2.0**-40
    ):  # there it is the first term, and too few bits of x are left after the point
        numerator, denominator = x.as_integer_ratio()
        return numerator * _TWO_BY_ROOT_PI / (denominator * _ONE) if x else x
    value = _fixed(x)
    square = value * value >> _BITS
    # the series of Maclaurin; its largest term is below e**36
    total = 0
    term = value
    n = 0
    while abs(term) > 1:
        total = total + term // (2 * n + 1)
        term = -(term * square >> _BITS) // (n + 1)
        n = n + 1
    return _float(total * _TWO_BY_ROOT_PI >> _BITS)


@contextmanager
def in_python_math() -> Iterator[None]:
    """Let functions of Python's `math` compute as here: schedulers, transforms and initializers call them."""
    originals = {
        each.__name__: getattr(math, each.__name__) for each in (exp, log, cos, sin, tan, erf)
    }
    for name, original in originals.items():
        setattr(math, name, _as_in_math(globals()[name], original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(math, name, original)


def _as_in_math(
    own: Callable[[float], float], original: Callable[..., float]
) -> Callable[..., float]:
    @wraps(original)
    def function(x: Any, *base: Any) -> float:
        value = original(x, *base)  # raises the errors, of wrong types and out of range
        number = float(x)
        if not (math.isfinite(value) and math.isfinite(number)):
            return value
        return own(number) if not base else own(number) / own(float(base[0]))

    return function
