"""Portable arithmetic in a script with a loop of its own: switched on by `use_kernels`, and what it refuses.

Operations are refused by the dispatch mode when they are reached. What it cannot see is refused here, before the first
step: optimizers and schedulers that compute powers of Python floats, and weights that were drawn before. `0.9 ** step`
is the C library's, whose last bit depends on the processor; own classes are read in bytecode.
"""

from __future__ import annotations

import atexit
import dis
import functools
import gc
import inspect
import linecache
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samebits.errors import ConfigError
from samebits.portable.arithmetic import is_portable, use_portable_arithmetic

# Processes that the script starts inherit it. They have to call `use_kernels` themselves.
VARIABLE = "SAMEBITS_KERNELS"
# Optimizers of torch without functions of Python floats.
_PLAIN = frozenset({"SGD", "Adagrad", "RMSprop", "Adadelta", "Rprop", "Muon"})


def use_kernels(kernels: Literal["auto", "portable"]) -> None:
    """Choose the arithmetic of a script with an exact loop. Call it at the start, before a model is made.

    Args:
        kernels: portable: from now on in this thread, every operation of torch has equal bits on each processor, or is
            refused by name (docs/portable.md); compiled models run eagerly. auto: as torch computes.

    Raises:
        ConfigError: A model exists already, or it is another value.
    """
    if kernels not in ("auto", "portable"):
        raise ConfigError(
            f"kernels is {kernels!r}", allowed="auto or portable", fix="Set one of them."
        )
    is_on = kernels == "portable"
    if (
        is_on
        and not is_portable()
        and any(issubclass(type(each), nn.Parameter) for each in gc.get_objects())
    ):
        raise ConfigError(
            "use_kernels('portable') is called after a model was made",
            cause="torch's random numbers differ between processors, so its initial weights do.",
            fix="Call samebits.use_kernels('portable') at the start of the script.",
        )
    use_portable_arithmetic(on=is_on)
    # Compiled kernels join operations that each have to round.
    torch.compiler.set_stance("force_eager" if is_on else "default")
    os.environ.pop(VARIABLE, None)
    if is_on:
        os.environ[VARIABLE] = kernels
        atexit.unregister(_leave)
        atexit.register(_leave)


def _leave() -> None:
    if is_portable():  # a mode that is entered at the interpreter's end fails to leave
        use_portable_arithmetic(on=False)


def own_kernels() -> str:
    """Return the arithmetic of this thread's loops: auto or portable.

    Raises:
        ConfigError: The script has chosen the other one, in another process.
    """
    found = "portable" if is_portable() else "auto"
    if os.environ.get(VARIABLE, "auto") == "portable" != found:
        raise ConfigError(
            "this process computes with kernels=auto, and the one that started it with kernels=portable",
            fix="Call samebits.use_kernels('portable') at the start of the function that each process runs.",
        )
    return found


def portable_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the optimizer's own `step`, in portable arithmetic.

    Raises:
        ConfigError: It computes powers of Python floats.
    """
    owner = next(base for base in type(optimizer).__mro__ if "step" in vars(base))
    method = type(optimizer).step
    is_adam = issubclass(owner, Adam) and owner.__module__.startswith("torch.optim")
    if owner.__module__.startswith("torch.optim"):
        if not is_adam and owner.__name__ not in _PLAIN:
            raise _refused(owner.__name__, fix="Use SGD, Adam or AdamW, or set kernels='auto'.")
    elif (line := find_in_class(type(optimizer))) is not None:
        raise _refused(type(optimizer).__name__, line)

    def step() -> Any:
        # The fused Adam computes its powers in one operation, which portable arithmetic replaces (`updates`).
        choice = {"fused": is_adam, "foreach": False}
        before = [
            {name: group[name] for name in choice if name in group}
            for group in optimizer.param_groups
        ]
        for group, had in zip(optimizer.param_groups, before, strict=True):
            group.update({name: choice[name] for name in had})
        try:
            return method(optimizer)  # closures are called before
        finally:
            for group, had in zip(optimizer.param_groups, before, strict=True):
                group.update(had)

    return step


def check_schedulers(optimizers: Iterable[Optimizer]) -> None:
    """Check the schedulers of optimizers, also those that the script has given to no one.

    Raises:
        ConfigError: One computes powers of Python floats.
    """
    own = set(map(id, optimizers))
    for each in gc.get_objects():
        if issubclass(type(each), LRScheduler) and id(getattr(each, "optimizer", None)) in own:
            _check_scheduler(each)


def _check_scheduler(scheduler: LRScheduler) -> None:
    kind = type(scheduler)
    values = vars(scheduler)
    if not kind.__module__.startswith("torch.optim"):
        line = find_in_class(kind)
        if line is not None:
            raise _refused(kind.__name__, line)
        return
    functions = [*values.get("lr_lambdas", ()), values.get("_scale_fn_custom")]
    line = next(filter(None, map(find_in_function, filter(None, functions))), None)
    if line is not None:
        raise _refused(kind.__name__, line)
    has_powers = {
        "PolynomialLR": values.get("power", 1) != 1,
        # The first power of a number is itself.
        "MultiStepLR": max(Counter(values.get("milestones", ())).values(), default=1) > 1,
        "CyclicLR": values.get("mode") == "exp_range",
    }
    if has_powers.get(kind.__name__):
        raise _refused(
            kind.__name__,
            fix="Use a step, linear, cosine or one-cycle schedule, or set kernels='auto'.",
        )


def _refused(
    name: str,
    where: str | None = None,
    fix: str = "Write math.pow(x, y), or x * x, instead of x ** y, or set kernels='auto'.",
) -> ConfigError:
    return ConfigError(
        f"{name} has no portable form",
        where=where,
        cause="It computes powers of Python floats by **, whose last bit is the C library's and the processor's.",
        fix=fix,
    )


def find_in_function(function: Any) -> str | None:
    """Return the first line of a function, or of functions of its module that it calls, that computes a power."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))  # torch wraps `step`
    if not isinstance(function, FunctionType):
        called = vars(type(function)).get("__call__")
        return find_in_function(called) if isinstance(called, FunctionType) else None
    return next(_lines(function, set()), None)


def find_in_class(kind: type) -> str | None:
    """Return the first such line of a class and of its bases outside of torch."""
    members = [
        each
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "builtins", "typing", "abc"))
        for each in vars(base).values()
    ]
    return next(
        filter(
            None, (find_in_function(each) for each in members if isinstance(each, FunctionType))
        ),
        None,
    )


def _lines(function: FunctionType, seen: set[int]) -> Iterator[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    for code in _codes(function.__code__):
        for each in dis.get_instructions(code):
            if each.opname == "BINARY_OP" and each.argrepr in ("**", "**="):
                line = each.positions.lineno if each.positions is not None else code.co_firstlineno
                yield f"{code.co_filename}:{line}: {linecache.getline(code.co_filename, line or 0).strip()}"
        for name in code.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__ == function.__module__:
                yield from _lines(called, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
