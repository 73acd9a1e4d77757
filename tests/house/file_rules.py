"""Rules for the length of functions, and the names and places of files. `test_rules.py` applies them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import code_lines, docstring_lines, nodes, sources, texts

FUNCTION_LINES = 80
MODULES_IMPORTED = 30
PAGE_LINES = 90
PAGES = ("src/samebits/engine/loop.py", "src/samebits/engine/step.py")
NAMELESS = {"util", "utils", "common", "misc", "helper", "helpers", "tools", "core"}
MACHINE_PATH = re.compile(r"(?<![\w.:/~}])/(home|root|Users|mnt|media|work|scratch|opt|tmp|farm)/\w[\w./-]*")


def long_functions(root: Path) -> Iterator[str]:
    """Functions longer than a screen; their docstring does not count."""
    for name, path in sources(root):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1 - len(docstring_lines(node))
                if lines > FUNCTION_LINES:
                    yield f"{name}:{node.lineno}: {node.name} has {lines} lines, {FUNCTION_LINES} at most"


def long_pages(root: Path) -> Iterator[str]:
    """The step and the loop, each longer than a page of code (blank lines, comments and docstrings don't count)."""
    for name in PAGES:
        path = root / name
        if not path.exists():
            yield f"{name}: not there"
        elif (count := code_lines(path)) > PAGE_LINES:
            yield f"{name}: {count} lines of code, a page has {PAGE_LINES}"


def busy_modules(root: Path) -> Iterator[str]:
    """Modules that import more modules of the package than a reader can keep in mind."""
    for name, path in sources(root, "src"):
        if name in ("src/samebits/__init__.py", "src/samebits/cli/app.py"):  # the lists of public names and of commands
            continue
        imports = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
        imported = {_module(root, node.module, item.name) for node in imports for item in node.names if node.module}
        count = len({module for module in imported if module.startswith("samebits.")})
        if count > MODULES_IMPORTED:
            yield f"{name}: imports {count} modules of the package, {MODULES_IMPORTED} at most"


def _module(root: Path, package: str, name: str) -> str:
    inner = root / "src" / package.replace(".", "/") / f"{name}.py"
    return f"{package}.{name}" if inner.exists() else package


def full_inits(root: Path) -> list[str]:
    """Anything in an `__init__.py` but the root's: re-exports make import circles."""
    return [
        f"{name}: not empty"
        for name, path in sources(root)
        if path.name == "__init__.py" and name != "src/samebits/__init__.py" and path.read_text().strip()
    ]


def nameless_places(root: Path) -> list[str]:
    """Folders and files that say nothing of what they hold."""
    return [
        f"{name}: {part} says nothing of what it holds"
        for name, path in sources(root)
        for part in path.relative_to(root).with_suffix("").parts
        if part in NAMELESS
    ]


def machine_paths(root: Path) -> Iterator[str]:
    """Paths that are there on one machine only."""
    for path in texts(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if found := MACHINE_PATH.search(line):
                yield f"{path.relative_to(root)}:{number}: {found.group()} is a path of one machine"


def twin_tests(root: Path) -> list[str]:
    """Files of tests with one name, which pytest can't collect in one run."""
    places: dict[str, list[str]] = {}
    for name, path in sources(root, "tests"):
        if path.name.startswith("test_"):
            places.setdefault(path.name, []).append(name)
    return [f"one name for two: {' '.join(names)}" for names in places.values() if len(names) > 1]


ALL = (
    long_functions, long_pages, busy_modules, full_inits, nameless_places, machine_paths,
    twin_tests,
)  # fmt: skip
