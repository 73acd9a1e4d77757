"""What the source of a script shows: whether it has an exact loop, and how a loop that is left ends. No torch."""

import ast
import linecache
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType

from samebits.errors import ConfigError
from samebits.frames import is_user

Loop = ast.For | ast.While
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def is_script(source: str) -> bool:
    """Return whether a source is a script with an exact loop, not a recipe file. Reads it without running it.

    Raises:
        ConfigError: It is a script without one.
    """
    path = Path(source)
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False
    if any(isinstance(node, ast.FunctionDef) and node.name == "build" for node in tree.body):
        return False
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (
        each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called
    )
    # exact, and the integrations' ExactStrategy, ExactAccelerator, ExactTrainer.
    if not any(name == "exact" or name.startswith("Exact") for name in names):
        raise ConfigError(
            f"{source} has no exact loop and is no recipe",
            allowed="a script that calls samebits.exact, or a recipe file with build(config)",
            fix="Add the lines of docs/own-loop.md to the script: model, optimizer, loader = samebits.exact(...). "
            "Or give --as N, as for samebits launch.",
        )
    return True


def ends_by_count(frames: Iterable[FrameType]) -> bool:
    """Return whether the loop that is being left ends by a number of batches: a limit of iterations or a counter."""
    for frame in [each for each in frames if is_user(each.f_code.co_filename)]:
        line = frame.f_lineno
        for loop in place_of(frame.f_code.co_filename, line)[1]:
            if isinstance(loop, ast.For) and line <= (loop.iter.end_lineno or 0):
                return True  # islice() or zip() has ended, and the loader has not
            inner = [
                each.test
                for each in ast.walk(loop)
                if isinstance(each, ast.If) and _has(each, line)
            ]
            sums = (each.target for each in ast.walk(loop) if isinstance(each, ast.AugAssign))
            counters = {number_of(loop), *map(ast.unparse, sums)}
            if any(counters & names(test) for test in inner):
                return True
    return False


def _has(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)


def number_of(loop: Loop) -> str:
    """Return the name of the number in `for number, batch in enumerate(...)`; "?" if there is none."""
    target = loop.target if isinstance(loop, ast.For) else None
    first = target.elts[0] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else None
    return first.id if isinstance(first, ast.Name) else "?"


@cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a cell of a notebook
        return ast.Module([], [])


def place_of(file: str, line: int) -> tuple[Scope, list[Loop]]:
    """Return the innermost function or module around a line, and its loops around it, innermost first."""
    scope: Scope = _tree(file)
    loops: list[Loop] = []
    for node in ast.walk(scope):  # outer ones before inner ones
        if getattr(node, "lineno", line + 1) <= line <= getattr(node, "end_lineno", 0):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                scope = node
                loops = []
            elif isinstance(node, Loop):
                loops.insert(0, node)
    return scope, loops


def names(node: ast.AST) -> set[str]:
    """Return the variables and attributes that a text reads: "x", "self", "self.loss"."""
    return {
        ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)
    }
