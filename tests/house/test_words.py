"""No text that users read has the words that STYLE retired."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# word or phrase -> what to write instead
RETIRED = {
    r"roll ?call": "rendezvous",
    r"gangs?": "pool of processes",
    r"deeds?": "scenario",
    r"made[- ]up": "synthetic",
    r"go(?:es)? on|went on|going on": "continue, resume",
    r"somebody|someone|nobody|whoever|everybody|anybody": "the user, a process, rank 0",
    r"held[- ]out": "validation",
    r"by itself": "automatically",
    r"says?|said|tells?|told|speaks?|hears?|heard": "report, log, print, receive",
    r"without a word": "silently",
    r"anew|afresh": "again",
    r"beside (training|it)": "in the background",
    r"wants?": "needs",
    r"that can't be": "is not allowed",
}
PAGES = ("*.md", "docs/*.md", "docs/adr/*.md", "lockstep/recipes/*/README.md")
_PATTERN = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): instead for word, instead in RETIRED.items()}


def _spoken(path: Path) -> Iterator[tuple[int, str]]:
    """Texts in code that users read: arguments of errors and of prints, help and descriptions of settings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_error = name.endswith("Error")
        is_text = name.endswith((".say", ".notice", "print", "Field", "Option", "Argument", ".block"))
        if is_error or is_text:
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                for part in ast.walk(argument):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.lineno, part.value


def found(root: Path) -> list[str]:
    """Places at which a text that users read has a retired word."""
    places = []
    for path in sorted((root / "lockstep").rglob("*.py")):
        for line, text in _spoken(path):
            places += [
                f"{path.relative_to(root)}:{line}: {match[0]!r} in {text[:60]!r}; write {instead}"
                for pattern, instead in _PATTERN.items()
                for match in pattern.finditer(text)
            ]
    for pages in PAGES:
        for path in sorted(root.glob(pages)):
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                places += [
                    f"{path.relative_to(root)}:{number}: {match[0]!r}; write {instead}"
                    for pattern, instead in _PATTERN.items()
                    for match in pattern.finditer(text)
                ]
    return places


def test_no_text_for_users_has_a_retired_word(repo: Path) -> None:
    assert found(repo) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lockstep/x.py", 'raise ConfigError("nobody said so")\n'),
        ("lockstep/x.py", 'x = Field(description="made-up lines")\n'),
        ("docs/x.md", "The run goes on.\n"),
    ],
)
def test_a_retired_word_is_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert len(found(tmp_path)) >= 1
