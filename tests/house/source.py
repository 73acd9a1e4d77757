"""Input of the house rules: source files, their syntax trees and their lines."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".ini", ".cfg", ".sh", ".html", ""}


def sources(root: Path, *folders: str) -> Iterator[tuple[str, Path]]:
    """Python files below the folders, with their names relative to the root."""
    for folder in folders or ("src", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


def texts(root: Path) -> Iterator[Path]:
    """Files of text in the checkout that people wrote."""
    for top in ("src", "tests", "benchmarks", "docs", ".ci"):
        for path in sorted((root / top).rglob("*")):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path
    # In a worktree .git is a file with the path of the repository.
    tops = (path for path in sorted(root.iterdir()) if path.is_file() and path.name != ".git")
    yield from (path for path in tops if path.suffix in TEXT)


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a Python file. Not to be changed: it is kept for the next rule."""
    return _parse(path.read_text(encoding="utf-8"))


def nodes(path: Path) -> list[ast.AST]:
    """All nodes of the syntax tree of a Python file, as `ast.walk` lists them."""
    return _walk(path.read_text(encoding="utf-8"))


# Each rule looks at every file.
@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _walk(text: str) -> list[ast.AST]:
    return list(ast.walk(_parse(text)))


def docstring_lines(node: ast.AST) -> range:
    """Line numbers of the docstring of a module, class or function; none if it has none."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        return range(body[0].lineno, (body[0].end_lineno or 0) + 1)
    return range(0)


def code_lines(path: Path) -> int:
    """How many lines of a file are neither blank, nor comments, nor docstrings."""
    text = path.read_text()
    documented = {line for node in nodes(path) for line in docstring_lines(node)}
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(text.splitlines(), start=1)
    )


def calls(root: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in the package, with the name of its file."""
    for name, path in sources(root, "src"):
        for node in nodes(path):
            if isinstance(node, ast.Call):
                yield name, node


def called(node: ast.Call) -> str:
    """What a call calls, as it is written: `os.path.join`."""
    return ast.unparse(node.func)
