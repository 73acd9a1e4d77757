"""What only the source of a script shows: whether it has an exact loop, how its loop ends, and what the loop keeps.

Without torch. A value that a loop carries from one micro-batch to the next, such as a counter, may first reach the loss
in step 20,000. No repetition of a micro-batch would meet that, but the text has it from the start.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

from samebits.errors import ConfigError
from samebits.frames import is_user

Loop = ast.For | ast.While
Scope = ast.Module | ast.FunctionDef
# exact(), and what the integrations have in its place; scripts derive classes from them.
_EXACT = {"exact", "ExactStrategy", "ExactAccelerator", "ExactTrainer"}


def is_script(source: str, ranks: int | None = None) -> bool:
    """Return whether a source is a script, not a recipe. Reads it without running it.

    Raises:
        ConfigError: It is a script without an exact loop, or with one and for `ranks` of `samebits launch`.
    """
    path = Path(source)
    if path.suffix != ".py" or not path.is_file():
        return bool(ranks)
    text = path.read_bytes()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # Python's own error is shown by what runs it
        return bool(ranks) or b"exact(" in text
    # Not by the text: a comment or a message may name them too.
    used = {each.rpartition(".")[2] for each in names(tree)}
    has_loop = bool(used & _EXACT) and b"samebits" in text
    # A script may have a function build() too.
    is_recipe = any(
        isinstance(each, ast.FunctionDef) and each.name == "build" for each in tree.body
    )
    if not ranks and not has_loop and is_recipe:
        return False
    if ranks and has_loop:
        raise ConfigError(
            f"{source} has an exact loop, which is not observed as {ranks} ranks",
            fix="Leave out --as: an exact loop is the same on any number of processes. If a file of samebits gate "
            "has it, give another --file.",
        )
    if not ranks and not has_loop:
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
            sums = (each.target for each in ast.walk(loop) if isinstance(each, ast.AugAssign))
            counters = {number_of(loop), *map(ast.unparse, sums)}
            if any(
                counters & names(each.test)
                for each in ast.walk(loop)
                if isinstance(each, ast.If) and each.lineno <= line <= (each.end_lineno or 0)
            ):
                return True
    return False


def number_of(loop: Loop) -> str:
    """Return the name of the number in `for number, batch in enumerate(...)`; "?" if there is none."""
    match loop:
        case ast.For(target=ast.Tuple(elts=[ast.Name(id=number), _])):
            return number if "enumerate(" in ast.unparse(loop.iter) else "?"
    return "?"


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
            if isinstance(node, ast.FunctionDef):
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


_BACKWARD = ("backward", "manual_backward")
_Assignment = ast.Assign | ast.AugAssign


def carried_into_loss(where: str) -> tuple[str, str]:
    """Find a value that a loop changes in each micro-batch, and that reaches the loss of the next one.

    What stands under a test may be an option that is off, or happen once a step, as under `if loader.sync_gradients`:
    it is left to the repetition of micro-batches.

    Args:
        where: The line that reads a batch, "train.py:12"; empty if there is none.

    Returns:
        The name and its line; both empty if there is none.
    """
    file, _, line = where.rpartition(":")
    for loop in place_of(file, int(line or 0))[1][:1]:
        nodes = [loop, *_sure(loop)]
        every = [each for each in nodes if isinstance(each, _Assignment)]
        fresh = {name for each in nodes if isinstance(each, ast.For) for name in names(each.target)}
        for each in every:
            if isinstance(each, ast.Assign) and not _targets(each) & names(each.value):
                fresh |= _targets(each)  # as by loss = criterion(...), before loss = loss + penalty
        changes = [({number_of(loop)}, loop.lineno)]
        changes += [(_targets(each) - fresh, each.lineno) for each in every]
        for changed, at in changes:
            values = set(changed)
            for each in every:  # what follows from it, in the next pass
                values |= _targets(each) if values & names(each.value) else set()
            if any(values & names(each) for each in nodes if _is_backward(each)):
                return min(changed), f"{file}:{at}"
    return "", ""


def _sure(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes within one that do not stand under a test."""
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.If):
            yield each
            yield from _sure(each)


def _targets(node: _Assignment) -> set[str]:
    """Return the variables and attributes that an assignment sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    every = [each for target in targets for each in getattr(target, "elts", [target])]
    return {ast.unparse(each) for each in every}


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _BACKWARD
