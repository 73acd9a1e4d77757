"""What a docstring has to explain: parameters and shapes. `test_rules.py` holds the checkout to these rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import sources

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Found = tuple[str, FunctionNode, ast.ClassDef | None]  # the file, the function, and its class if it is a method

PARAMETERS_WITHOUT_ARGS = 2
SECTION = re.compile(r"^Args:\n(?P<body>(?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)
ARRAYS = re.compile(r"\b(Tensor|ndarray|NDArray)\b")
_SIZE = r"(?:\.\.\.|[\dA-Za-z]{1,2}|[A-Z_]+|num_\w+|\w*length|height|width|side|rows)"
_AXIS = rf"{_SIZE}(?:(?: ?[-+*/] ?| or | ){_SIZE})*"
SHAPE = re.compile(
    rf"\({_AXIS},(?: {_AXIS},?)*\)"  # (N, C, H, W), (n,), (..., 2)
    r"|\b(scalars?|0-d|[Aa]ny shape|same shapes?|shapes? of|[Ss]hapes? \(|parameters' shapes)"
)
SEE = re.compile(r"See `(\w+\.\w+)`\.")


def missing_args(root: Path) -> list[str]:
    """Public functions with three or more parameters whose docstring does not explain each in `Args`."""
    problems = []
    commands = _commands(root)
    for name, node, owner in _to_explain(root):
        parameters = _parameters(node, is_method=owner is not None)
        explained = _explained(ast.get_docstring(node) or "")
        missing = [each for each in parameters if each not in explained]
        if len(parameters) > PARAMETERS_WITHOUT_ARGS and missing and (name, node.name) not in commands:
            problems.append(f"{name}:{node.lineno}: Args of {node.name} leave out {', '.join(missing)}")
    return problems


def missing_shapes(root: Path) -> list[str]:
    """Public functions that take or return tensors or arrays, and name no shape."""
    problems = []
    for name, node, _ in _to_explain(root):
        annotations = [each.annotation for each in _arguments(node)] + [node.returns]
        has_arrays = any(each is not None and ARRAYS.search(ast.unparse(each)) for each in annotations)
        if has_arrays and not SHAPE.search(ast.get_docstring(node) or ""):
            problems.append(f"{name}:{node.lineno}: {node.name} names no shape")
    return problems


def _to_explain(root: Path) -> Iterator[Found]:
    """Public functions and methods of the package that no other docstring explains."""
    found = [each for name, path in sources(root, "lockstep") for each in _public_functions(name, path)]
    methods = {f"{owner.name}.{node.name}" for _, node, owner in found if owner}
    bases = {owner.name: [ast.unparse(base).partition("[")[0] for base in owner.bases] for *_, owner in found if owner}
    for name, node, owner in found:
        see = SEE.match(ast.get_docstring(node) or "")
        if see and see[1] in methods:
            continue
        if owner and any(f"{base}.{node.name}" in methods for base in _all_bases(owner.name, bases)):
            continue
        yield name, node, owner


def _public_functions(name: str, path: Path) -> Iterator[Found]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if _is_public(node) and isinstance(node, FunctionNode):
            yield name, node, None
        elif _is_public(node) and isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, FunctionNode) and _is_public(inner))
            yield from ((name, inner, node) for inner in methods)


def _is_public(node: ast.stmt) -> bool:
    """Whether this defines a function or class whose name has no underscore in front."""
    if not isinstance(node, FunctionNode | ast.ClassDef) or node.name.startswith("_"):
        return False
    return not any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list)


def _all_bases(name: str, bases: dict[str, list[str]]) -> Iterator[str]:
    for base in bases.get(name, []):
        yield base
        yield from _all_bases(base, bases)


def _commands(root: Path) -> set[tuple[str, str]]:
    """File and function of each typer command: its docstring is the text of --help, and its options have their own."""
    commands = set()
    for name, path in sources(root, "lockstep/cli"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, FunctionNode) and any(_registers(mark) for mark in node.decorator_list):
                commands.add((name, node.name))
            if isinstance(node, ast.Call) and _registers(node.func) and isinstance(node.args[0], ast.Attribute):
                module, _, function = ast.unparse(node.args[0]).rpartition(".")  # app.command("train")(train.train)
                commands.add((f"lockstep/cli/{module}.py", function))
    return commands


def _registers(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("app.command", "app.callback")


def _arguments(node: FunctionNode) -> list[ast.arg]:
    given = node.args
    starred = [each for each in (given.vararg, given.kwarg) if each]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]


def _parameters(node: FunctionNode, *, is_method: bool) -> list[str]:
    names = [each.arg for each in _arguments(node)]
    is_static = any(ast.unparse(mark) == "staticmethod" for mark in node.decorator_list)
    return names[1:] if is_method and not is_static else names


def _explained(docstring: str) -> set[str]:
    """Names in the section `Args` of a docstring."""
    section = SECTION.search(docstring + "\n")
    entries = ENTRY.finditer(section["body"]) if section else ()
    return {name.lstrip("*") for entry in entries for name in entry["names"].split(", ")}


ALL = (missing_args, missing_shapes)
