"""Source files, syntax trees and lines for the rules of the house."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".ini", ".cfg", ".sh", ".html", ""}


def sources(root: Path, *folders: str) -> Iterator[tuple[str, Path]]:
    """Yield the Python files in folders, with their names relative to the root."""
    for folder in folders or ("lockstep", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


def texts(root: Path) -> Iterator[Path]:
    """Yield the text files of the checkout."""
    for top in ("lockstep", "tests", "benchmarks", "docs", ".ci"):
        for path in sorted((root / top).rglob("*")):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path
    # In a worktree .git is a file with the path of the repository.
    tops = (path for path in sorted(root.iterdir()) if path.is_file() and path.name != ".git")
    yield from (path for path in tops if path.suffix in TEXT)


def docstring_lines(node: ast.AST) -> range:
    """Return the line numbers of the docstring of a module, class or function; empty if it has none."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        return range(body[0].lineno, (body[0].end_lineno or 0) + 1)
    return range(0)


def code_lines(path: Path) -> int:
    """Count the lines of a file that are neither blank, nor comments, nor docstrings."""
    text = path.read_text()
    documented = {line for node in ast.walk(ast.parse(text)) for line in docstring_lines(node)}
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(text.splitlines(), start=1)
    )


def calls(root: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield every call in the package, with the name of its file."""
    for name, path in sources(root, "lockstep"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield name, node


def called(node: ast.Call) -> str:
    """Return the function of a call as written, such as `os.path.join`."""
    return ast.unparse(node.func)
