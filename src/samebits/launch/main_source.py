"""The source of a function of a notebook or script, with all that it uses, as the text of a module.

Other processes cannot import a notebook's cells. The usual answers are to pickle the function, or to fork the kernel
with its threads and its CUDA context. This module collects text instead:

    function ── names that it uses ── functions and classes of cells: their source, and so on for the names in it
                                      modules and what they define:   an import
                                      numbers, texts, lists of them:  their value
                                      anything else:                  an error that names it

No cell runs again, so training that another cell did is not repeated.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import linecache
import math
import symtable
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

from samebits.errors import ConfigError

_MAX_VALUE_CHARS = 10_000  # of a value that is copied as text


def is_main(thing: Any) -> bool:
    """Return whether a function or class was defined in a notebook, an interactive session or the main script."""
    return getattr(thing, "__module__", None) == "__main__"


def check_function(function: Any, what: str) -> None:
    """Check that another process can find a function.

    Args:
        function: What the user gave.
        what: Its role, the subject of the error.

    Raises:
        ConfigError: It is not a function with a name.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        kind = "a lambda" if isinstance(function, FunctionType) else f"a {type(function).__name__}"
        raise ConfigError(f"{what} is {kind}", allowed="a function", fix="Define it with def, and give its name.")
    if "<locals>" in function.__qualname__ or "." in function.__qualname__:
        raise ConfigError(
            f"{what} {function.__qualname__} is defined inside another function or a class",
            fix="Define it at the top level of a cell or file.",
        )


def module_text(function: FunctionType) -> str:
    """Return the text of a module that defines a function of `__main__` and everything that it uses.

    Raises:
        ConfigError: It uses an object that cannot be written as text, such as a model that another cell made.
    """
    collector = _Collector(function.__globals__)
    collector.add(function.__name__, function, function.__name__)
    future = ["from __future__ import annotations\n"] if _has_future_annotations(function.__code__) else []
    return "\n\n".join([*future, *collector.texts]) + "\n"


class _Collector:
    """Collects texts of definitions, each after those that it uses.

    Args:
        namespace: The names of the notebook or script.

    Attributes:
        texts: The definitions.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._seen: set[str] = set()
        self.texts: list[str] = []

    def add(self, name: str, value: Any, user: str) -> None:
        """Add a name, once.

        Args:
            name: The name.
            value: What it means.
            user: The function or class that uses it.
        """
        if name in self._seen:
            return
        self._seen.add(name)
        if isinstance(value, ModuleType):
            self.texts.append(f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else ""))
        elif is_main(value) and isinstance(value, FunctionType | type):
            self._add_definition(name, value)
        elif (home := _home(value)) is not None:
            module, inner_name = home
            self.texts.append(f"from {module} import {inner_name}" + (f" as {name}" if name != inner_name else ""))
        elif (text := _value_text(value)) is not None:
            self.texts.append(f"{name} = {text}")
        else:
            raise ConfigError(
                f"{user} uses {name}, a {type(value).__name__} that other processes do not have",
                cause="processes share no objects: each runs the text of the function and of the functions and classes "
                "it uses",
                fix=f"Make {name} inside {user}, or in a function that {user} calls; or give numbers and texts as "
                "arguments.",
            )

    def _add_definition(self, name: str, value: FunctionType | type) -> None:
        if isinstance(value, FunctionType) and value.__code__.co_freevars:
            raise ConfigError(
                f"{name} uses {value.__code__.co_freevars[0]} of the function in which it is defined",
                fix="Define it at the top level of a cell or file.",
            )
        source = _source(value, self._namespace)
        if source is None:
            raise ConfigError(f"the source of {name} can't be found", fix=f"Run the cell that defines {name} again.")
        tree = ast.parse(source)
        for used in _global_names(source):
            if used in self._namespace and used != value.__name__:
                self.add(used, self._namespace[used], value.__name__)
        for module in _submodules(tree, self._namespace):
            if module not in self._seen:
                self._seen.add(module)
                self.texts.append(f"import {module}")
        self.texts.append(source + (f"\n\n{name} = {value.__name__}" if name != value.__name__ else ""))


def _source(value: FunctionType | type, namespace: dict[str, Any]) -> str | None:
    """Return the source of a function or class of `__main__` with its decorators, without indentation."""
    if isinstance(value, FunctionType):
        texts = ["".join(linecache.getlines(value.__code__.co_filename))]
    else:
        texts = list(_main_texts(namespace))
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a cell in another language
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if isinstance(value, type) or first == value.__code__.co_firstlineno:
                    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    return None


def _main_texts(namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the cells that were run, the newest first; or the main script."""
    yield from (text for text in reversed(namespace.get("In", [])) if isinstance(text, str))
    if isinstance(path := namespace.get("__file__"), str):
        yield "".join(linecache.getlines(path))


def _global_names(source: str) -> Iterator[str]:
    """Yield the names that a definition takes from its module, in order of appearance."""
    waiting = [symtable.symtable(source, "<definition>", "exec")]
    while waiting:
        table = waiting.pop()
        is_module = table.get_type() == "module"
        yield from (
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (is_module or symbol.is_global()) and symbol.get_name() not in vars(builtins)
        )
        waiting.extend(table.get_children())


def _submodules(tree: ast.AST, namespace: dict[str, Any]) -> Iterator[str]:
    """Yield modules below an imported one: `import sklearn.datasets` binds sklearn, which alone lacks datasets."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        parts, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and isinstance(module := namespace.get(inner.id), ModuleType):
            name = ".".join([module.__name__, *reversed(parts)])
            if isinstance(sys.modules.get(name), ModuleType):
                yield name


def _home(value: Any) -> tuple[str, str] | None:
    """Return the module and the name under which another process can import a function, class or instance."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or module == "__main__" or not name.isidentifier():
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def _value_text(value: Any) -> str | None:
    """Return the text of a plain value, or None if it has none."""
    if isinstance(value, PurePath):
        return f'__import__("pathlib").Path({str(value)!r})'
    if not is_plain(value):
        return None
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else None


def is_plain(value: Any) -> bool:
    """Return whether a value is None, a number, a text, or a list, tuple or dict of such values."""
    if value is None or type(value) in (bool, int, str):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) in (list, tuple):
        return _all_plain(value)
    return type(value) is dict and _all_plain(value) and _all_plain(value.values())


def _all_plain(values: Iterable[Any]) -> bool:
    return all(is_plain(value) for value in values)


def _has_future_annotations(code: CodeType) -> bool:
    return bool(code.co_flags & __future__.annotations.compiler_flag)
