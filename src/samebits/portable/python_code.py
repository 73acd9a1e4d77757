"""Find `**` in code: of Python floats, a square too, it is the C library's, whose last bit depends on the processor.

A dispatch mode sees operations on tensors only. Updates and schedules of own classes are read instead, in bytecode.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


def find_in_function(function: Any) -> str | None:
    """Return the first line of a function, or of functions of its module that it calls, that computes a power."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))  # torch wraps `step`
    if not isinstance(function, FunctionType):
        called = vars(type(function)).get("__call__")
        return find_in_function(called) if isinstance(called, FunctionType) else None
    return next(_lines(function, set()), None)


def find_in_class(kind: type, package: str) -> str | None:
    """Return the first such line of a class and of its bases outside of a package."""
    members = [
        each
        for base in kind.__mro__
        if not base.__module__.startswith((package, "builtins", "typing", "abc"))
        for each in vars(base).values()
    ]
    return next(filter(None, (find_in_function(each) for each in members if isinstance(each, FunctionType))), None)


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
