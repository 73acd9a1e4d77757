"""Rules for docstrings: parameters and shapes. `test_rules.py` applies them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import nodes, parsed, sources

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Found = tuple[str, FunctionNode, ast.ClassDef | None]  # the file, the function, and its class if it is a method

PARAMETERS_WITHOUT_ARGS = 2
INTEGRATIONS = [f"src/samebits/integrations/{name}.py" for name in ("accelerate", "lightning", "transformers")]
SECTION = re.compile(r"^Args:\n(?P<body>(?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): ", re.MULTILINE)
# Verbs alone: "Records", "Checks" or "Names" may be nouns.
THIRD_PERSON = re.compile(
    r"(Add|Appl(ie)?|Assign|Build|Close|Collect|Compare|Compute|Connect|Create|Decide|Decode|Detect|Determine|Draw|"
    r"Encode|End|Explain|Find|Gather|Generate|Give|Hold|Join|Keep|Load|Make|Measure|Merge|Open|Paint|Parse|Print|Raise|"
    r"Read|Recognize|Refuse|Remove|Replay|Reserve|Restore|Return|Run|Select|Send|Separate|Serve|Set|Share|Sign|Start|"
    r"Supervise|Take|Trace|Translate|Wait|Walk|Write|Yield)s "
)
ARRAYS = {"Tensor", "ndarray", "NDArray"}
_SIZE = r"(?:\.\.\.|\d+|[\dA-Za-z]{1,2}|[A-Z_]+|\w+_\w+|count|height|length|more|rows|side|width)"
_AXIS = rf"{_SIZE}(?:(?: ?[-+*/] ?| or | ){_SIZE})*"
SHAPE = re.compile(
    rf"\({_AXIS},(?: {_AXIS},?)*\)"  # (N, C, H, W), (n,), (..., 2)
    r"|\b(scalars?|0-d|[Aa]ny shape|same shapes?|shapes? of|[Ss]hapes? \(|parameters' shapes)"
)
# Modules of functions that stand in for torch's operations: torch's documentation has their parameters.
ATEN = "of torch's operations (ATen)"
SEE = re.compile(r"See `(\w+\.\w+)`\.")


def missing_args(root: Path) -> Iterator[str]:
    """Functions of the public API with three or more parameters whose docstring does not explain each in `Args`.

    Elsewhere, `Args` leaves out a parameter whose name and type say what it is.
    """
    offered = _offered(root)
    for name, node, owner in _to_explain(root):
        parameters = _parameters(node, is_method=owner is not None)
        is_offered = (name, (owner or node).name) in offered or name in INTEGRATIONS
        if len(parameters) <= PARAMETERS_WITHOUT_ARGS or not is_offered:
            continue
        explained = _explained(node, owner)
        missing = [each for each in parameters if each not in explained]
        if missing:
            yield f"{name}:{node.lineno}: Args of {_title(node, owner)} leave out {', '.join(missing)}"


def stale_args(root: Path) -> Iterator[str]:
    """Public functions whose docstring explains a parameter that they do not have."""
    for name, node, owner in _to_explain(root):
        unknown = _explained(node, owner) - set(_parameters(node, is_method=owner is not None))
        if unknown:
            yield f"{name}:{node.lineno}: {_title(node, owner)} has no {', '.join(sorted(unknown))}"


def missing_shapes(root: Path) -> Iterator[str]:
    """Public functions that take or return tensors or arrays, and name no shape."""
    aliases = _array_aliases(root)
    for name, node, owner in _to_explain(root):
        annotations = [each.annotation for each in _arguments(node)] + [node.returns]
        words = {word for each in annotations if each is not None for word in re.findall(r"\w+", ast.unparse(each))}
        if words & (ARRAYS | aliases[name]) and not SHAPE.search(_docstring(node, owner)):
            yield f"{name}:{node.lineno}: {_title(node, owner)} names no shape"


def third_person(root: Path) -> Iterator[str]:
    """Docstrings of modules and functions of the package whose first word is a verb in the third person."""
    for name, path in sources(root, "src"):
        for node in nodes(path):
            if isinstance(node, FunctionNode | ast.Module):
                verb = THIRD_PERSON.match(ast.get_docstring(node) or "")
                if verb:
                    line = getattr(node, "lineno", 1)
                    yield f"{name}:{line}: the docstring starts with {verb[0].strip()}: use the imperative"


def _array_aliases(root: Path) -> dict[str, set[str]]:
    """For each file the names, such as IntArray, that it or a module it imports them from gives to a kind of array."""
    trees = {name: parsed(path) for name, path in sources(root, "src")}
    aliases: dict[str, set[str]] = {}
    for name, tree in trees.items():
        given = [node for node in tree.body if isinstance(node, ast.Assign)]
        given = [node for node in given if re.match(r"(\w+\.)?NDArray\[", ast.unparse(node.value))]
        aliases[name] = {ast.unparse(target) for node in given for target in node.targets}
    imported: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                known = aliases.get(f"src/{(node.module or '').replace('.', '/')}.py", set())
                imported[name] |= known & {item.name for item in node.names}
    return {name: aliases[name] | imported[name] for name in trees}


def _to_explain(root: Path) -> Iterator[Found]:
    """Public functions and methods of the package that no other docstring explains."""
    found = [
        each
        for name, path in sources(root, "src")
        if ATEN not in (ast.get_docstring(parsed(path)) or "")
        for each in _public_functions(name, path)
    ]
    methods = {f"{owner.name}.{node.name}" for _, node, owner in found if owner}
    bases = {owner.name: [ast.unparse(base).partition("[")[0] for base in owner.bases] for *_, owner in found if owner}
    for name, node, owner in found:
        see = SEE.match(_docstring(node, owner))
        if see and see[1] in methods:
            continue
        if (
            owner
            and node.name != "__init__"
            and any(f"{base}.{node.name}" in methods for base in _all_bases(owner.name, bases))
        ):
            continue
        yield name, node, owner


def _public_functions(name: str, path: Path) -> Iterator[Found]:
    for node in parsed(path).body:
        if _is_public(node) and isinstance(node, FunctionNode):
            yield name, node, None
        elif _is_public(node) and isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, FunctionNode) and _is_public(inner))
            yield from ((name, inner, node) for inner in methods)


def _is_public(node: ast.stmt) -> bool:
    """Whether this defines a function or class without an underscore in front, or an `__init__`."""
    if not isinstance(node, FunctionNode | ast.ClassDef):
        return False
    if any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list):
        return False
    return not node.name.startswith("_") or node.name == "__init__"


def _all_bases(name: str, bases: dict[str, list[str]]) -> Iterator[str]:
    for base in bases.get(name, []):
        yield base
        yield from _all_bases(base, bases)


def _offered(root: Path) -> set[tuple[str, str]]:
    """File and name of what `import samebits` offers."""
    path = root / "src/samebits/__init__.py"
    return {
        (f"src/{node.module.replace('.', '/')}.py", alias.name)
        for node in (nodes(path) if path.exists() else ())
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _arguments(node: FunctionNode) -> list[ast.arg]:
    given = node.args
    starred = [each for each in (given.vararg, given.kwarg) if each]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]


def _parameters(node: FunctionNode, *, is_method: bool) -> list[str]:
    names = [each.arg for each in _arguments(node)]
    is_static = any(ast.unparse(mark) == "staticmethod" for mark in node.decorator_list)
    return names[1:] if is_method and not is_static else names


def _docstring(node: FunctionNode, owner: ast.ClassDef | None) -> str:
    """The docstring that explains a function: that of the class for an `__init__`."""
    return ast.get_docstring(owner if owner and node.name == "__init__" else node) or ""


def _title(node: FunctionNode, owner: ast.ClassDef | None) -> str:
    return owner.name if owner and node.name == "__init__" else node.name


def _explained(node: FunctionNode, owner: ast.ClassDef | None) -> set[str]:
    """Names in the section `Args` of a docstring."""
    section = SECTION.search(_docstring(node, owner) + "\n")
    entries = ENTRY.finditer(section["body"]) if section else ()
    return {name.lstrip("*") for entry in entries for name in entry["names"].split(", ")}


ALL = (missing_args, stale_args, missing_shapes, third_person)
