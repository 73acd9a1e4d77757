"""Find the private names of other packages that the package uses. `test_private_names.py` compares them with a list.

A name is private if it begins with one underscore. It belongs to another package if it is imported from there, if a
class from there defines it that one of ours derives from, or if nothing of ours defines it: no class of the same file
and, of self, no class that it derives from. Sources are read, not imported: optional packages take seconds to import.
"""

import ast
import builtins
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house.source import nodes, parsed, sources

PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Documented in spite of the underscore: os._exit, sys._getframe, and the methods of named tuples.
DOCUMENTED = {"_exit", "_getframe", "_fields", "_asdict", "_replace", "_make"}
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "find")  # `find` is that of integrations/lightning_log.py
LIGHTNING = "lightning.pytorch"
SELF = ast.Name("self", ast.Load())

Place = tuple[str, str]  # a module and a name in it
Class = tuple[str, ast.Module, ast.ClassDef]  # a class, with its module


def used(root: Path) -> dict[str, set[str]]:
    """The private names of other packages, each with the files that use it."""
    found: dict[str, set[str]] = {}
    files = dict(sources(root, "src"))
    classes = {
        node.name: (_module(name), parsed(path), node)
        for name, path in files.items()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }
    for name, path in files.items():
        for private in _of_file(_module(name), path, classes):
            found.setdefault(private, set()).add(name)
    return found


def _of_file(module: str, path: Path, classes: dict[str, Class]) -> Iterator[str]:
    owners: dict[ast.AST, ast.ClassDef] = {}  # the innermost class of each node, as `nodes` goes from the outside in
    for each in nodes(path):
        if isinstance(each, ast.ClassDef):
            owners |= dict.fromkeys(ast.walk(each), each)
    own = _defined(parsed(path))
    for node in nodes(path):
        names = [(base, name) for base, name in _names(node) if PRIVATE.fullmatch(name) and name not in DOCUMENTED]
        for base, name in names:
            owner = owners.get(node)
            if base is None:
                yield name
            elif owner is not None and ast.unparse(base) in ("self", "cls", "super()", "type(self)"):
                ours = own.union(*(_defined(each) for *_, each in _ancestors(owner, classes)))
                if name not in ours or name in _inherited((module, parsed(path), owner), classes):
                    yield name
            elif name not in own:
                yield name


def _names(node: ast.AST) -> Iterator[tuple[ast.expr | None, str]]:
    """Names in a node, each with the expression that it is an attribute of; None for names that are imported."""
    if isinstance(node, ast.ImportFrom) and not node.module.startswith("samebits"):
        yield from ((None, each) for each in [*node.module.split("."), *(item.name for item in node.names)])
    elif isinstance(node, ast.Import):
        yield from ((None, each) for item in node.names for each in item.name.split("."))
    elif isinstance(node, ast.Attribute):
        yield node.value, node.attr
    elif isinstance(node, ast.ClassDef):
        # A method is an attribute of self.
        yield from ((SELF, each.name) for each in node.body if isinstance(each, ast.FunctionDef))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
        words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        yield from ((None if ast.unparse(node.func) == "find" else node.args[0], each) for each in words)


@cache
def _defined(tree: ast.AST) -> set[str]:
    """Private names of functions, classes, attributes of self and class attributes in a tree."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if PRIVATE.fullmatch(name)}


def _ancestors(node: ast.ClassDef, classes: dict[str, Class]) -> Iterator[Class]:
    """The classes of ours that a class derives from, over all levels."""
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        if name in classes and classes[name][2] is not node:
            yield classes[name]
            yield from _ancestors(classes[name][2], classes)


def _inherited(owner: Class, classes: dict[str, Class]) -> set[str]:
    """Private names of the classes of other packages that a class of ours derives from."""
    return set().union(*(_foreign_bases(each) for each in [owner, *_ancestors(owner[2], classes)]))


def _foreign_bases(owner: Class) -> Iterator[str]:
    module, tree, node = owner
    for base in node.bases:
        found = _find(module, tree, ast.unparse(base).partition("[")[0])
        if found is not None and not found[0].startswith("samebits"):
            yield from _defined(found[2]) - DOCUMENTED
            yield from _foreign_bases(found)


def _find(module: str, tree: ast.Module, name: str) -> Class | None:
    """The class that a module calls by this name, such as `nn.Module`, wherever it is defined."""
    first, _, rest = name.partition(".")
    stars = []
    for node in _statements(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, tree, node
        for bound, (place, inner) in _bindings(module, node):
            if bound == first and (place, inner) != (module, name):
                return find_class(".".join(filter(None, (place, inner))), rest) if rest else find_class(place, inner)
            if bound == "*":
                stars.append(place)
    return next(filter(None, (find_class(place, name) for place in stars)), None)


@cache
def find_class(module: str, name: str) -> Class | None:
    """The class that a module of any package calls by this name."""
    path = _source(module)
    return None if path is None or hasattr(builtins, name) else _find(module, parsed(path), name)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module, also those under `if` and `try`, but not of its functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _statements(node)


def _bindings(module: str, node: ast.AST) -> Iterator[tuple[str, Place]]:
    """Names that an import, or an assignment of `find`, binds; each with what it stands for."""
    if isinstance(node, ast.ImportFrom):
        start = ""
        if node.level:
            is_package = (_source(module) or Path()).stem == "__init__"
            start = ".".join(module.split(".")[: len(module.split(".")) + is_package - node.level])
        place = ".".join(filter(None, (start, node.module)))
        yield from ((item.asname or item.name, (place, item.name)) for item in node.names)
    elif isinstance(node, ast.Import):
        for item in node.names:
            place = item.name if item.asname else item.name.partition(".")[0]
            yield item.asname or place, (place, "")
    elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
        words = [each.value for each in node.value.args if isinstance(each, ast.Constant)]
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if ast.unparse(node.value.func) == "find" and len(words) == 2:
            yield ast.unparse(targets[0]), (f"{LIGHTNING}.{words[0]}", words[1])


@cache
def _source(module: str) -> Path | None:
    """The source of a module, found without importing it: only the top of its package is looked up."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    if not inner:
        return Path(spec.origin)
    place = Path(spec.origin).parent.joinpath(*inner)
    tries = (place / "__init__.py", place.with_suffix(".py"), place / "__init__.pyi", place.with_suffix(".pyi"))
    return next((path for path in tries if path.is_file()), None)


def _module(name: str) -> str:
    return name.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def defines(module: str, inner: str, name: str) -> bool:
    """Whether the source of a module defines a private name.

    Args:
        module: Of another package.
        inner: A class that the module has; empty for the module itself.
        name: The private name.
    """
    found = find_class(module, inner or name)
    if found is None and not inner and (path := _source(module)) is not None:
        # A mark that the module sets on objects.
        return re.search(rf"[.\"']{name}\b", path.read_text(encoding="utf-8")) is not None
    return found is not None and (not inner or name in {*_defined(found[2]), *_foreign_bases(found)})
