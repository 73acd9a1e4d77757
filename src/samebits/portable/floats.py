"""Elementary functions of Python floats, correctly rounded: learning rates and augmentation are part of the result.

`math.cos` and its like are the C library's, which differ between machines in their last bit. These compute in integers,
with 160 significant bits or more, and round once. Nothing here imports torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

from samebits.errors import ConfigError

_BITS = 160
_ONE = 1 << _BITS


def _series(inverse: int, bits: int, *, alternating: bool) -> int:
    """Arctangent of 1 / inverse, or the inverse hyperbolic tangent, whose terms do not alternate."""
    total, term, n = 0, (1 << bits) // inverse, 1
    while term:
        total += -(term // n) if alternating and n & 2 else term // n
        term //= inverse * inverse
        n += 2
    return total


@cache
def _ln2(bits: int) -> int:
    return 2 * _series(3, bits, alternating=False)


@cache
def _half_pi(bits: int) -> int:
    wide = bits + 16  # Machin's formula multiplies the errors of its terms
    return 2 * (4 * _series(5, wide, alternating=True) - _series(239, wide, alternating=True)) >> 16


_TWO_BY_ROOT_PI = math.isqrt((2 << 3 * _BITS) // _half_pi(_BITS))


def _fixed(x: float, bits: int) -> int:
    numerator, denominator = x.as_integer_ratio()
    return (numerator << bits) // denominator


def _precision(x: float) -> int:
    """Bits after the point that leave enough of a small number, and of a large one without its multiples of pi."""
    return _BITS + abs(math.frexp(x)[1])


def _exp(value: int, bits: int) -> int:
    k, rest = divmod(value, _ln2(bits))
    total, term, n = 0, 1 << bits, 1
    while term:
        total += term
        term = (term * rest >> bits) // n
        n += 1
    return total << k if k >= 0 else total >> -k


def _log(numerator: int, denominator: int, bits: int) -> int:
    exponent = numerator.bit_length() - denominator.bit_length()
    value = (numerator << bits + max(-exponent, 0)) // (denominator << max(exponent, 0))
    if value < 3 << bits - 2:  # otherwise the terms of x near 1 cancel
        value, exponent = 2 * value, exponent - 1
    s = ((value - (1 << bits)) << bits) // (value + (1 << bits))
    square = s * s >> bits
    total, term, n = 0, s, 1
    while abs(term) > 1:
        total += term // n
        term = term * square >> bits
        n += 2
    return 2 * total + exponent * _ln2(bits)


def _sine(x: float, bits: int, quarters: int) -> int:
    """Sine of x and some quarters of a circle."""
    half_pi = _half_pi(bits)
    quadrant, rest = divmod(_fixed(x, bits) + half_pi // 2, half_pi)
    rest -= half_pi // 2
    quadrant += quarters
    odd = quadrant & 1
    square = rest * rest >> bits
    total, term, n = 0, 1 << bits if odd else rest, 0 if odd else 1
    while abs(term) > 1:
        total += term
        term = -(term * square >> bits) // ((n + 1) * (n + 2))
        n += 2
    return -total if quadrant & 2 else total


def exp(x: float) -> float:
    """e**x."""
    if not math.isfinite(x) or abs(x) > 800:
        return x if x > 0 or math.isnan(x) else 0.0
    bits = _BITS + 2 * int(abs(x))
    return _exp(_fixed(x, bits), bits) / (1 << bits)  # Python rounds a quotient of integers correctly


def log(x: float) -> float:
    """Natural logarithm of a positive number, also of an integer beyond the range of floats."""
    return _log(*x.as_integer_ratio(), _BITS) / _ONE


def power(base: float, exponent: int) -> float:
    """base**exponent for a positive base and a whole exponent, to 45 decimal places."""
    result, factor = _ONE, _fixed(base, _BITS)
    while exponent:
        if exponent & 1:
            result = result * factor >> _BITS
        factor, exponent = factor * factor >> _BITS, exponent >> 1
    return result / _ONE


def cos(x: float) -> float:
    """Cosine of a finite number."""
    bits = _precision(x)
    return _sine(x, bits, 1) / (1 << bits)


def sin(x: float) -> float:
    """Sine of a finite number."""
    bits = _precision(x)
    return _sine(x, bits, 0) / (1 << bits) if x else x


def tan(x: float) -> float:
    """Tangent of a finite number."""
    bits = _precision(x)
    return _sine(x, bits, 0) / _sine(x, bits, 1) if x else x


def erf(x: float) -> float:
    """Error function."""
    if abs(x) >= 6 or math.isnan(x):
        return x if math.isnan(x) else math.copysign(1.0, x)
    if abs(x) < 2.0**-40:  # there it is the first term, and too few bits of x are left after the point
        numerator, denominator = x.as_integer_ratio()
        return numerator * _TWO_BY_ROOT_PI / (denominator * _ONE) if x else x
    value = _fixed(x, _BITS)
    square = value * value >> _BITS
    total, term, n = 0, value, 0  # the series of Maclaurin; its largest term is below e**36
    while abs(term) > 1:
        total += term // (2 * n + 1)
        term = -(term * square >> _BITS) // (n + 1)
        n += 1
    return (total * _TWO_BY_ROOT_PI >> _BITS) / _ONE


def expm1(x: float) -> float:
    """e**x - 1."""
    bits = _precision(x) + 2 * int(abs(x)) if abs(x) < 800 else _BITS
    return (_exp(_fixed(max(x, -800.0), bits), bits) - (1 << bits)) / (1 << bits) if x else x


def _hyperbolic(x: float) -> tuple[int, int, int]:
    """e**x and e**-x, and 1."""
    bits = _precision(x) + 2 * int(abs(x))
    up = _exp(_fixed(x, bits), bits)
    return up, (1 << 2 * bits) // up, 1 << bits


def sinh(x: float) -> float:
    """(e**x - e**-x) / 2."""
    up, down, one = _hyperbolic(x)
    return (up - down) / (2 * one) if x else x


def cosh(x: float) -> float:
    """(e**x + e**-x) / 2."""
    up, down, one = _hyperbolic(x)
    return (up + down) / (2 * one)


def tanh(x: float) -> float:
    """`sinh` / `cosh`; beyond 20 it is 1."""
    if abs(x) > 20:
        return math.copysign(1.0, x)
    up, down, _ = _hyperbolic(x)
    return (up - down) / (up + down) if x else x


def log1p(x: float) -> float:
    """log(1 + x)."""
    numerator, denominator = x.as_integer_ratio()
    bits = _precision(x)
    return _log(numerator + denominator, denominator, bits) / (1 << bits) if x else x


def log2(x: float) -> float:
    """Logarithm of base 2."""
    return _log(*x.as_integer_ratio(), _BITS) / _ln2(_BITS)


def log10(x: float) -> float:
    """Logarithm of base 10."""
    return _log(*x.as_integer_ratio(), _BITS) / _log(10, 1, _BITS)


def _arctan(numerator: int, denominator: int, bits: int) -> int:
    """Arctangent of a quotient of positive integers."""
    if numerator > denominator:
        return _half_pi(bits) - _arctan(denominator, numerator, bits)
    value, halvings, one = (numerator << bits) // denominator, 8, 1 << bits
    for _ in range(halvings):  # arctan(x) = 2 arctan(x / (1 + sqrt(1 + x * x)))
        value = (value << bits) // (one + math.isqrt((one << bits) + value * value))
    square = value * value >> bits
    total, term, n = 0, value, 1
    while abs(term) > 1:
        total += term // n
        term = -(term * square >> bits)
        n += 2
    return total << halvings


def atan2(y: float, x: float) -> float:
    """Angle of the point (x, y), both finite and not 0."""
    (a, b), (c, d) = abs(y).as_integer_ratio(), abs(x).as_integer_ratio()
    bits = _BITS + abs(math.frexp(y)[1]) + abs(math.frexp(x)[1])
    angle = _arctan(a * d, b * c, bits)
    return math.copysign((angle if x > 0 else 2 * _half_pi(bits) - angle) / (1 << bits), y)


def atan(x: float) -> float:
    """Arctangent."""
    return atan2(x, 1.0) if x else x


def _root(x: float) -> tuple[int, int]:
    """sqrt((1 - x) * (1 + x)), and 1, of a number from -1 to 1."""
    numerator, denominator = x.as_integer_ratio()
    bits = _precision(x)
    return math.isqrt((denominator * denominator - numerator * numerator) << 2 * bits), denominator << bits


def asin(x: float) -> float:
    """Arcsine: the arctangent of x / sqrt(1 - x * x)."""
    root, one = _root(x)
    bits = _precision(x)
    numerator, denominator = abs(x).as_integer_ratio()
    angle = _arctan(numerator * one, denominator * root, bits) if root else _half_pi(bits)
    return math.copysign(angle / (1 << bits), x)


def acos(x: float) -> float:
    """Arccosine: twice the arctangent of sqrt(1 - x * x) / (1 + x)."""
    if x == -1:
        return 2 * _half_pi(_BITS) / _ONE
    root, one = _root(x)
    numerator, denominator = x.as_integer_ratio()
    return 2 * _arctan(root * denominator, (denominator + numerator) * one, _BITS) / _ONE


def hypot(*sides: float) -> float:
    """Square root of the sum of squares."""
    pairs = [each.as_integer_ratio() for each in sides]
    common = max((denominator for _, denominator in pairs), default=1)  # powers of two
    total = sum((numerator * (common // denominator)) ** 2 for numerator, denominator in pairs)
    return math.isqrt(total << 2 * _BITS) / (common << _BITS)


def pow(x: float, y: float) -> float:
    """x**y of a number that is not 0, positive or with a whole exponent."""
    sign = -1.0 if x < 0 and y % 2 else 1.0
    numerator, denominator = abs(x).as_integer_ratio()
    if y.is_integer() and abs(y) <= 64:
        n = int(abs(y))
        top, bottom = numerator**n, denominator**n
        return sign * (top / bottom if y >= 0 else bottom / top)
    bits = 2 * _BITS + abs(math.frexp(y)[1]) + 1100  # results from 2**-1074 on
    top, bottom = y.as_integer_ratio()
    return sign * (_exp(_log(numerator, denominator, bits) * top // bottom, bits) / (1 << bits))


_COVERED = (
    exp, log, cos, sin, tan, erf, expm1, sinh, cosh, tanh, log1p, log2, log10, atan2, atan, asin, acos, hypot, pow,
)  # fmt: skip
# The C library's too, and without a form here.
_REFUSED = "acosh asinh atanh cbrt erfc gamma lgamma"


@contextmanager
def in_python_math() -> Iterator[None]:
    """Let functions of Python's `math` compute as here: schedulers, transforms and initializers call them.

    Modules that have imported one by its name, as `random` does, get it too.
    """
    functions = {id(original): own for original, own in _replacements()}
    places = [
        (names, name, value)
        for names in [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
        for name, value in list(names.items())
        if id(value) in functions
    ]
    for names, name, value in places:
        names[name] = functions[id(value)]
    try:
        yield
    finally:
        for names, name, value in places:
            names[name] = value


def _replacements() -> Iterator[tuple[Any, Callable[..., float]]]:
    for own in _COVERED:
        original = getattr(math, own.__name__)
        yield original, _as_in_math(own, original)
    for name in _REFUSED.split():
        yield getattr(math, name), _refusing(name)


def _as_in_math(own: Callable[..., float], original: Callable[..., float]) -> Callable[..., float]:
    @wraps(original)
    def function(*values: Any) -> float:
        result = original(*values)  # raises the errors, of wrong types and out of range
        # Zeros and infinities are exact in each library.
        if not math.isfinite(result) or not result or any(abs(each) == math.inf for each in values):
            return result
        numbers = [each if isinstance(each, int) and own is log else float(each) for each in values]
        if own is log and len(numbers) == 2:
            return own(numbers[0]) / own(numbers[1])
        return own(*numbers) if own is not atan2 or all(numbers) else result

    return function


def _refusing(name: str) -> Callable[..., float]:
    def refuse(*_: Any) -> float:
        raise ConfigError(
            f"math.{name} has no portable form",
            cause="It is the C library's, whose last bit depends on the processor.",
            fix="Use another function, or set kernels=auto.",
        )

    return refuse
