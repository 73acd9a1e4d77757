"""Elementary functions of Python floats, rounded once: learning rates and augmentation are part of the result.

`math.cos` and its like are the C library's, which differ between machines in their last bit. These are mpmath's, which
computes in integers, with 200 bits. Nothing here imports torch.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

_PRECISION = 200


class _Now(threading.local):
    is_computing = False  # mpmath estimates by functions of `math`: these are Python's then


_now = _Now()


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Functions of mpmath's numbers and of a precision, which keep nothing between calls, by their names in `math`."""
    from mpmath import libmp  # type: ignore[import-untyped]  # no types. Late: most processes need none

    def of_logarithm(base: int) -> Callable[..., Any]:
        of_base = libmp.mpf_log(libmp.from_int(base), _PRECISION)
        return lambda x, bits: libmp.mpf_div(libmp.mpf_log(x, bits), of_base, bits)

    def expm1(x: Any, bits: int) -> Any:
        return libmp.mpf_sub(libmp.mpf_exp(x, 1300), libmp.fone, bits)  # of the smallest x too

    def log1p(x: Any, bits: int) -> Any:
        return libmp.mpf_log(libmp.mpf_add(x, libmp.fone), bits)

    def hypot(*sides: Any) -> Any:
        *values, bits = sides
        total = libmp.mpf_sum([libmp.mpf_mul(each, each) for each in values])
        return libmp.mpf_sqrt(total, bits)

    names = "exp log cos sin tan erf erfc sinh cosh tanh asin acos atan atan2 asinh acosh atanh cbrt pow gamma"
    found: dict[str, Callable[..., Any]] = {
        name: getattr(libmp, f"mpf_{name}") for name in names.split()
    }
    own = {
        "log2": of_logarithm(2),
        "log10": of_logarithm(10),
        "expm1": expm1,
        "log1p": log1p,
        "hypot": hypot,
    }
    return found | own | {"lgamma": libmp.mpf_loggamma}


def _rounded(name: str, *values: float) -> float:
    """Compute a function of `math` of finite numbers, where its result is finite, and round it once."""
    from mpmath import libmp

    _now.is_computing = True
    try:
        numbers = [
            libmp.from_int(each) if isinstance(each, int) else libmp.from_float(each)
            for each in values
        ]
        result = float(libmp.to_float(_functions()[name](*numbers, _PRECISION), rnd="n"))
        return result or math.copysign(0.0, values[0])  # mpmath has no -0
    finally:
        _now.is_computing = False


exp = partial(_rounded, "exp")
log = partial(_rounded, "log")
cos = partial(_rounded, "cos")
sin = partial(_rounded, "sin")
erf = partial(_rounded, "erf")
power = partial(_rounded, "pow")


@contextmanager
def in_python_math() -> Iterator[None]:
    """Let functions of Python's `math` compute as here: schedulers, transforms and initializers call them.

    Modules that have imported one by its name, as `random` does, get it too.
    """
    functions = {id(getattr(math, name)): _as_in_math(name) for name in _functions()}
    places = [
        (names, name, value)
        for names in [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
        # First all values of a module at once, which takes a third of the time: few have one of them.
        if not functions.keys().isdisjoint(map(id, list(names.values())))
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


def _as_in_math(name: str) -> Callable[..., float]:
    original = getattr(math, name)

    @wraps(original)
    def function(*values: Any) -> float:
        if _now.is_computing:
            return float(original(*values))
        result = float(original(*values))  # raises the errors, of wrong types and out of range
        # Zeros and infinities are exact in each library.
        if not math.isfinite(result) or not result or any(abs(each) == math.inf for each in values):
            return result
        numbers = [each if isinstance(each, int) else float(each) for each in values]
        if name == "log" and len(numbers) == 2:
            return log(numbers[0]) / log(numbers[1])
        return _rounded(name, *numbers)

    return function
