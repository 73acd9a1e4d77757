"""Which modules read ranks or print; rules for names, classes and docstrings. `test_rules.py` applies them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house.source import nodes, parsed, sources

RANK_CALLS = {"get_rank", "get_world_size", "get_node_local_rank", "get_global_rank"}
RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(SLURM|OMPI|PMIX?|TORCHELASTIC)_.*"
)
SPEAKERS = (
    "src/samebits/cli/",
    "src/samebits/doctor/",
    "src/samebits/report/",
    "src/samebits/cluster/",
    "src/samebits/launch/",
    "src/samebits/watchdog/",
    "src/samebits/__main__.py",
    "src/samebits/own_loop/ending.py",  # the errors of a script that Samebits has not started
)


def ranks_asked_for(root: Path) -> Iterator[str]:
    """Code that asks torch for its rank instead of taking a World."""
    for name, path in sources(root, "src"):
        # A script's own process group is the only source of its world.
        if name.startswith(
            (
                "src/samebits/cluster/",
                "src/samebits/launch/",
                "src/samebits/watchdog/",
                "src/samebits/own_loop/current.py",
            )
        ):
            continue
        for node in nodes(path):
            called = isinstance(node, ast.Attribute) and node.attr in RANK_CALLS
            imported = isinstance(node, ast.ImportFrom) and any(item.name in RANK_CALLS for item in node.names)
            if called or imported:
                yield f"{name}:{node.lineno}: asks torch for the rank; take a World"


def ranks_read_from_environment(root: Path) -> Iterator[str]:
    """Code that reads RANK and similar variables outside of cluster/env.py."""
    for name, path in sources(root, "src"):
        if name in ("src/samebits/cluster/env.py", "src/samebits/cluster/env.py"):
            continue
        for node in nodes(path):
            variable = _variable_read(node)
            if variable and RANK_VARIABLES.fullmatch(variable):
                yield f"{name}:{node.lineno}: reads {variable}; only cluster/env.py does"


def imports_of_the_root(root: Path) -> list[str]:
    """Modules of the package that import the package itself, whose public names come from them: an import circle."""
    return [
        f"{name}:{node.lineno}: imports samebits; import the module that defines the name"
        for name, path in sources(root, "src")
        for node in nodes(path)
        if isinstance(node, ast.Import) and any(item.name == "samebits" for item in node.names)
        if name != "src/samebits/__main__.py"
    ]


def twin_classes(root: Path) -> list[str]:
    """Public classes of the package with one name. Each recipe has settings of its own: `Config`, `DataConfig`."""
    places: dict[str, list[str]] = {}
    for name, path in sources(root, "src"):
        is_recipe = name.startswith("src/samebits/recipes/") and name.endswith("/config.py")
        for node in parsed(path).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if not (is_recipe and node.name.endswith("Config")):
                places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    return [f"two classes {name}: {' '.join(found)}" for name, found in places.items() if len(found) > 1]


def old_words(root: Path) -> Iterator[str]:
    """Names with "iter", which can mean a step or a micro-batch."""
    for name, path in sources(root, "src"):
        for node in nodes(path):
            word = _named(node)
            if (
                word
                and {"iter", "iters", "iteration", "iterations"} & set(word.strip("_").split("_"))
                and word != "__iter__"
            ):
                yield f"{name}:{node.lineno}: {word}; say step, micro_batch or epoch"


def _variable_read(node: ast.AST) -> str | None:
    """Return the name of the environment variable that an expression reads, if any."""
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and "environ" in ast.unparse(node.value):
        key = node.slice
    elif isinstance(node, ast.Call) and re.search(r"environ\.(get|pop)$|getenv$", ast.unparse(node.func)) and node.args:
        key = node.args[0]
    elif isinstance(node, ast.Compare) and "environ" in ast.unparse(node.comparators[-1]):
        key = node.left
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def _named(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def errors_without_a_fix(root: Path) -> Iterator[str]:
    """Errors for users that do not say what to do. Slots that do not exist are refused by `SamebitsError` and mypy."""
    trees = {name: parsed(path) for name, path in sources(root, "src")}
    errors = _subclasses("SamebitsError", list(trees.values()))
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in errors):
                continue
            fix = next((keyword.value for keyword in node.keywords if keyword.arg == "fix"), None)
            if fix is None or (isinstance(fix, ast.Constant) and not fix.value):
                yield f"{name}:{node.lineno}: an error without a fix"


def _subclasses(base: str, trees: list[ast.Module]) -> set[str]:
    """Names of a class and of all classes derived from it."""
    bases = {
        node.name: {ast.unparse(each).rpartition(".")[2] for each in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    names = {base}
    while more := {name for name, parents in bases.items() if parents & names} - names:
        names |= more
    return names


def stray_speech(root: Path) -> Iterator[str]:
    """Code that writes to the console outside of the packages that may."""
    for name, path in sources(root, "src"):
        if name.startswith(SPEAKERS):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "sys.stdout.write",
                "sys.stderr.write",
            ):
                yield f"{name}:{node.lineno}: speaks; hand it to report or cli"


def borrowed_names(root: Path) -> list[str]:
    """`from samebits.x import Name` where x itself imports Name from another module."""
    problems = []
    defined = cache(_defined)  # for this call only: the files may change between calls
    for name, path in sources(root):
        for node in nodes(path):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("samebits."):
                continue
            target = root / "src" / node.module.replace(".", "/")
            if target.is_dir():
                known = {item.stem for item in target.iterdir()}
            elif target.with_suffix(".py").exists():
                known = defined(target.with_suffix(".py"))
            else:
                known = set()
            problems += [
                f"{name}:{node.lineno}: {node.module} does not define {item.name}"
                for item in node.names
                if item.name not in known
            ]
    return problems


def missing_docstrings(root: Path) -> list[str]:
    """Public modules, classes, functions and methods of the package without a docstring."""
    problems = []
    for name, path in sources(root, "src"):
        tree = parsed(path)
        if tree.body and not ast.get_docstring(tree):
            problems.append(f"{name}:1: the module has no docstring")
        problems += [f"{name}:{node.lineno}: {node.name} has no docstring" for node in _public(tree)]
    return problems


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        written_twice = any(ast.unparse(mark).endswith(("overload", ".setter")) for mark in node.decorator_list)
        if not ast.get_docstring(node) and not written_twice:
            yield node
        if isinstance(node, ast.ClassDef):
            yield from _public(node)


ALL = (
    errors_without_a_fix, ranks_asked_for, ranks_read_from_environment, stray_speech, borrowed_names,
    imports_of_the_root, missing_docstrings, twin_classes, old_words,
)  # fmt: skip
