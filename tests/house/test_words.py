"""No text that users read, and no comment or docstring of the package, has a retired word."""

import ast
import re
import tokenize
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
# Retired in comments and docstrings only: pages may have figures, and a test may put something back.
RETIRED_IN_CODE = {
    r"facts": "dataset info, metadata, values",
    r"figures": "metrics, measurements, values",
    r"meetings?": "rendezvous",
    r"puts? (?:aside|back)|putting (?:aside|back)": "snapshot, reset",
    r"takes? up|taking up|taken up": "restore",
    r"a person's|people's": "the user's",
}
# British spellings, also inside names: torch's, and so the field's, are American.
_BRITISH = re.compile(
    r"colour|centre|grey|neighbour|behaviour|labelled|licence|catalogue|(?:normal|initial|synchron|serial|optim|minim|recogn)is(?:e|ing)",
    re.I,
)
PEOPLE = "src/samebits/recipes/pose/"  # where a person is an object in an image
PAGES = ("*.md", "docs/*.md", "docs/adr/*.md", "src/samebits/recipes/*/README.md")


def _compile(words: dict[str, str]) -> dict[re.Pattern[str], str]:
    """Compile phrases, which may be broken at the end of a line."""
    return {re.compile(rf"\b(?:{word})\b".replace(" ", r"\s+"), re.I): instead for word, instead in words.items()}


_PATTERN = _compile(RETIRED)
_PATTERN_IN_CODE = _compile(RETIRED | RETIRED_IN_CODE)


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


def _written(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and docstrings of a module. Comments on consecutive lines are one text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text
    comments: dict[int, str] = {}
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string.lstrip("# ")
    for start in comments:
        if start - 1 not in comments:
            end = next(number for number in range(start, len(comments) + start + 1) if number not in comments)
            yield start, "\n".join(comments[number] for number in range(start, end))


def found(root: Path) -> list[str]:
    """Places at which a text that users read, a comment or a docstring has a retired word."""
    places = []
    for path in sorted((root / "src" / "samebits").rglob("*.py")):
        for line, text in _spoken(path):
            places += [
                f"{path.relative_to(root)}:{line}: {match[0]!r} in {text[:60]!r}; write {instead}"
                for pattern, instead in _PATTERN.items()
                for match in pattern.finditer(text)
            ]
        name = path.relative_to(root).as_posix()
        places += [
            f"{name}:{number}: {match[0]!r}; write American English"
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
            for match in _BRITISH.finditer(text)
        ]
        places += [
            f"{name}:{line + text[: match.start()].count(chr(10))}: {match[0]!r} in a comment; write {instead}"
            for line, text in _written(path)
            for pattern, instead in _PATTERN_IN_CODE.items()
            for match in pattern.finditer(text)
            if not (match[0].endswith("'s") and name.startswith(PEOPLE))
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


@pytest.mark.check
def test_no_text_has_a_retired_word(repo: Path) -> None:
    assert found(repo) == []


@pytest.mark.parametrize(
    ("name", "text", "is_retired"),
    [
        ("src/samebits/x.py", 'raise ConfigError("nobody said so")\n', True),
        ("src/samebits/x.py", 'x = Field(description="made-up lines")\n', True),
        ("src/samebits/x.py", '"""Give a person\'s files to the model."""\n', True),
        ("src/samebits/x.py", 'class A:\n    def f(self):\n        """Put\n        back the model."""\n', True),
        ("src/samebits/x.py", "def draw(num_colours): ...\n", True),
        ("src/samebits/x.py", "x = 1  # the facts of the dataset\n", True),
        ("src/samebits/x.py", "# This process tells\n# the others.\n", True),
        ("src/samebits/x.py", "# The run goes\n# on.\n", True),
        ("docs/x.md", "The run goes on.\n", True),
        ("src/samebits/x.py", 'figures = "somebody"\n', False),
        ("src/samebits/recipes/pose/x.py", "# a person's joints\n", False),
        ("docs/x.md", "All figures are in the log.\n", False),
    ],
)
def test_a_retired_word_is_found_if_it_is_no_data(tmp_path: Path, name: str, text: str, is_retired: bool) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert bool(found(tmp_path)) == is_retired
