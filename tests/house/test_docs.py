"""Documents: links, forms, Chinese pages, and the commands, options and settings that they name."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
NAMED_FILE = re.compile(r"`((?:samebits|tests|docs|benchmarks|examples)/[\w./-]+\.\w+|\.ci/\w+)`")
MAKE = re.compile(r"(?<!samebits data )\bmake ([a-z][a-z-]+)")  # `samebits data make` is no target
ADR_SECTIONS = ["Question", "Decision", "Rejected alternatives", "When to reconsider"]


def documents(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("*.md"))
    for folder in ("docs", "src", "benchmarks", "examples", "tests"):
        yield from sorted((root / folder).rglob("*.md"))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: its headings, and the settings in its tables."""
    headings = re.findall(r"^#+\s+(.*)$", _without_code(text), re.MULTILINE)
    names = {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'<a id="([\w-]+)">', text))


def dead_links(root: Path) -> list[str]:
    """Relative links whose file or heading does not exist; links to the web are not checked."""
    problems = []
    for page in documents(root):
        for target in LINK.findall(_without_code(page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name) if name else page
            if not file.exists():
                problems.append(f"{page.relative_to(root)}: {target} is not there")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                problems.append(f"{page.relative_to(root)}: {target}: no such heading")
    return problems


def gone_files(root: Path) -> list[str]:
    """Files named in `backticks` that do not exist; the changelog may name former ones."""
    return [
        f"{page.relative_to(root)}: `{name}` is not there"
        for page in documents(root)
        if page.name != "CHANGELOG.md"
        for name in NAMED_FILE.findall(page.read_text())
        if not (root / name).exists()
    ]


def gone_targets(root: Path) -> list[str]:
    """`make` targets in the documents that the Makefile does not have."""
    known = set(re.findall(r"^([a-z][a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    known |= {f"bench-{path.stem.replace('_', '-')}" for path in (root / "benchmarks").glob("*.py")}
    problems = []
    for page in documents(root):
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`|^    .*$", page.read_text(), re.DOTALL | re.MULTILINE))
        problems += [f"{page.relative_to(root)}: make {name}" for name in MAKE.findall(code) if name not in known]
    return problems


def keywords_made_tuples(root: Path) -> list[str]:
    """Lines of code such as `x = (1,)`: a formatter makes them of keyword arguments without their call, `x=1,`."""
    return [
        f"{page.relative_to(root)}: {ast.unparse(node)}"
        for page in documents(root)
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for node in ast.walk(ast.parse(re.sub(r"^%%.*", "", block)))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 1
    ]


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]+`", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("check", [dead_links, gone_files, gone_targets, keywords_made_tuples])
def test_documents_point_to_what_is_there(repo: Path, check: object) -> None:
    assert callable(check)
    assert check(repo) == []


@pytest.mark.parametrize(
    ("check", "text", "says"),
    [
        (dead_links, "[a](gone.md)", "gone.md is not there"),
        (dead_links, "![a](pictures/gone.png)", "gone.png is not there"),
        (dead_links, "# One\n[a](#two)", "#two: no such heading"),
        (gone_files, "see `samebits/gone.py`", "`samebits/gone.py` is not there"),
        (gone_targets, "    make gone", "make gone"),
        (keywords_made_tuples, '```python\nmonitor = (("top1", "max"),)\n```', "monitor = "),
    ],
)
def test_a_dead_pointer_is_noticed(tmp_path: Path, check: object, text: str, says: str) -> None:
    assert callable(check)
    (tmp_path / "Makefile").write_text("test:\n")
    page = tmp_path / "README.md"
    page.write_text(
        "# Two words\n[a](#two-words) [b](README.md#two-words) [c](https://example.org) `[d](e)`\n    make test\n"
    )
    assert check(tmp_path) == []
    page.write_text(text)
    (problem,) = check(tmp_path)
    assert says in problem


def test_every_decision_has_rejected_alternatives_and_when_to_reconsider(repo: Path) -> None:
    decisions = sorted((repo / "docs/adr").glob("[0-9]*.md"))
    assert decisions
    assert [int(path.name[:4]) for path in decisions] == list(range(1, len(decisions) + 1))
    for path in decisions:
        text = path.read_text()
        assert text.startswith(f"# {int(path.name[:4])}. "), path.name
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ADR_SECTIONS, path.name
        assert len(text.splitlines()) <= 70, f"{path.name}: a decision fits on a page"


@pytest.mark.check
def test_the_index_of_decisions_names_each_with_its_state(repo: Path) -> None:
    index = (repo / "docs/adr/README.md").read_text()
    for path in sorted((repo / "docs/adr").glob("[0-9]*.md")):
        lines = [line for line in index.splitlines() if line.startswith(f"| [{int(path.name[:4])}]({path.name}) |")]
        assert len(lines) == 1, path.name
        head = path.read_text().split("## Question")[0]
        for state in ("superseded in part", "extended by"):
            assert (state in head.lower()) == (state in lines[0]), path.name
        in_full = "**Superseded** by" in head
        assert in_full == (lines[0] in index.split("## Superseded")[1]), path.name


def test_the_change_log_starts_with_what_is_unreleased(repo: Path) -> None:
    headings = re.findall(r"^## \[(.*?)\]", (repo / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings
    assert headings[0] == "Unreleased"


def test_the_tree_in_the_tour_names_every_package(repo: Path) -> None:
    tour = (repo / "docs/tour.md").read_text()
    packages = {path.parent.name for path in (repo / "src" / "samebits").glob("*/__init__.py")}
    packages |= {path.parent.name for path in (repo / "src/samebits/recipes").glob("*/__init__.py")}
    missing = {package for package in packages if not re.search(rf"^\s*{package}/\s+\S", tour, re.MULTILINE)}
    assert not missing


def test_the_tours_table_of_places_names_functions_that_exist(repo: Path) -> None:
    table = (repo / "docs/tour.md").read_text().split("## Where it happens")[1].split("\n## ")[0]
    places = re.findall(r"`([a-z_/]+\.py)`(?:: `([\w.]+)`)?", table)
    assert len(re.findall(r"^\| (?!what happens)\w", table, re.MULTILINE)) >= 12
    assert len(places) >= 12
    for path, name in places:
        text = (repo / "src/samebits" / path).read_text()
        for part in filter(None, name.split(".")):
            assert re.search(rf"^\s*(def|class) {part}\b", text, re.MULTILINE), (path, part)


@pytest.mark.check
def test_a_contributors_first_path_takes_two_hours(repo: Path) -> None:
    """README, tour and the files that the tour names, at 200 words and 50 lines of code a minute."""
    tour = (repo / "docs/tour.md").read_text()
    files = set(re.findall(r"src/samebits/[a-z_/]+\.py", tour))
    assert len(files) <= 25
    num_lines = sum(len((repo / name).read_text().splitlines()) for name in files)
    assert num_lines <= 5_000
    num_words = len((repo / "README.md").read_text().split()) + len(tour.split())
    assert num_words / 200 + num_lines / 50 <= 120, f"{num_words} words and {num_lines} lines"


def test_the_license_is_whole(repo: Path) -> None:
    text = (repo / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


HAN = "\u4e00-\u9fff"
CODE = re.compile(r"```.*?```|``.+?``|`[^`\n]+`", re.DOTALL)
LINK_TARGET = re.compile(r"\]\([^)\s]*\)")
# A half-width mark beside a Chinese character, also with a code span or a bracket of Markdown between.
HALF_WIDTH = re.compile(rf"[{HAN}]\**[,;:?!()](?!\d)|[,;:?!()]\**[{HAN}]|[{HAN}]\.(?:\s|$)")
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


def chinese_pages(root: Path) -> list[Path]:
    """The Chinese README and the pages in docs/zh-CN."""
    return [root / "README.zh-CN.md", *sorted((root / "docs/zh-CN").glob("*.md"))]


def english_page(page: Path, root: Path) -> Path:
    """The page that a Chinese one translates."""
    return root / "README.md" if page.parent == root else root / "docs" / page.name


def half_width_marks(text: str) -> list[str]:
    """Lines with half-width punctuation in Chinese text; code and the targets of links are left out."""
    prose = LINK_TARGET.sub("]", CODE.sub("\u7801", text))
    return [line for line in prose.splitlines() if HALF_WIDTH.search(line)]


def commands(text: str) -> set[str]:
    """The commands of a page's transcripts, without comments."""
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines() if line.startswith("$ ")]
    return {re.sub(r"\s+#.*", "", line) for line in lines}


def test_chinese_pages_have_full_width_punctuation(repo: Path) -> None:
    pages = chinese_pages(repo)
    assert len(pages) > 6
    found = {page.name: half_width_marks(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("text", ["\u8fdb\u7a0b,", "\u4e00(`x`)", "`x`:", "\u4e00.", "**\u4e00**;"])
def test_half_width_punctuation_is_noticed(text: str) -> None:
    assert half_width_marks(f"\u4e00{text}") != []


def test_full_width_punctuation_and_code_are_left_alone() -> None:
    text = "\u4e00\uff0c[\u4e00](a.md)\u3002`a, b`\uff08c\uff09 torch 2.15, a\n```\n\u4e00, b\n```\n"
    assert half_width_marks(text) == []


def test_a_chinese_page_has_the_commands_of_the_english_one(repo: Path) -> None:
    missing = {}
    for page in chinese_pages(repo)[1:]:
        english = english_page(page, repo)
        link = f"[English](../{english.name})"
        assert link in page.read_text(encoding="utf-8"), page.name
        missing[page.name] = commands(english.read_text(encoding="utf-8")) - commands(page.read_text(encoding="utf-8"))
    assert {name: lines for name, lines in missing.items() if lines} == {}


COMMAND = re.compile(r"\bsamebits(?: (data))? (\w[\w-]*)((?: [^#\n`|]*)?)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
ASSIGNED = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)*)=")
NAMED = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`")
# Sections of settings. Names such as `data.batch(...)` or `test.png` are none.
ENDINGS = {
    "png", "jpg", "py", "md", "yaml", "json", "jsonl", "csv", "tsv", "txt", "safetensors", "onnx", "pth", "gz", "html",
    "zip", "sig", "svg",
}  # fmt: skip


@cache
def options() -> dict[str, set[str]]:
    """Every command with its options."""
    import typer

    from samebits.cli.app import app
    from samebits.ranks.start import _parser

    found: dict[str, set[str]] = {}
    todo = [("", typer.main.get_command(app))]
    while todo:
        path, command = todo.pop()
        found[path] = {name for parameter in command.params for name in parameter.opts}
        todo += [(f"{path} {name}".strip(), inner) for name, inner in getattr(command, "commands", {}).items()]
    # Its flags are torchrun's, some of its own, and those of the script that follows.
    found["launch"] |= {option for action in _parser()._actions for option in action.option_strings} | {"--epochs"}
    return found


@cache
def settings() -> frozenset[str]:
    """The keys of all recipes' settings, and of the example's."""
    from samebits.config import describe
    from samebits.recipes.catalog import find, list_recipes

    own = ["model.width"]
    keys = [setting.key for name in list_recipes() for setting in describe.settings(find(name).config_class)]
    return frozenset([*keys, *own])


def pages(root: Path) -> Iterator[Path]:
    """What users read; decisions and results name what was removed."""
    yield from (root / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "SECURITY.md"))
    yield from sorted(page for page in (root / "docs").glob("*.md") if page.name not in ("results.md", "tour.md"))
    yield from sorted((root / "docs/zh-CN").glob("*.md"))
    yield from sorted((root / "src/samebits/recipes").glob("*/README.md"))


def unknown_names(text: str) -> list[str]:
    """Commands, options and settings in a page's code that do not exist."""
    problems: list[str] = []
    lines = text.split("\n")
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        for group, name, rest in COMMAND.findall(line) if "is not a setting" not in after else []:
            if not re.search(r"`|^ {4}|^\$ |^- samebits", line):
                continue  # prose
            command = f"{group} {name}".strip()
            if command not in options():
                problems += [f"samebits {command}"] if line.startswith("$ ") else []
                continue
            rest = rest.partition(" -- ")[0]  # arguments of a script follow
            problems += [
                f"samebits {command} {name}" for name in OPTION.findall(rest) if name not in options()[command]
            ]
            if command in ("train", "eval", "predict", "submit"):
                problems += [key for key in ASSIGNED.findall(OPTION.sub("", rest)) if key not in settings()]
    sections = {key.split(".")[0] for key in settings() if "." in key}
    for key in NAMED.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        first, last = key.split(".")[0], key.rsplit(".", 1)[1]
        if first in sections and last not in ENDINGS and key not in settings():
            problems.append(key)
    return problems


def test_commands_options_and_settings_in_the_documents_exist(repo: Path) -> None:
    found = {str(page.relative_to(repo)): unknown_names(page.read_text(encoding="utf-8")) for page in pages(repo)}
    assert {page: problems for page, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("$ samebits tarin digits", "samebits tarin"),
        ("$ samebits train digits --prox 2", "samebits train --prox"),
        ("    samebits train digits optim.rl=0.1   # a comment", "optim.rl"),
        ("set `watch.hang_timeout=3`", "watch.hang_timeout"),
    ],
)
def test_a_name_that_does_not_exist_is_noticed(text: str, says: str) -> None:
    assert unknown_names(text) == [says]


def test_names_that_exist_are_left_alone() -> None:
    text = """$ srun --mem=3 samebits train digits --procs 2 optim.lr=0.1 data.root=DIR  # x=1
`samebits data make classify --out DIR`, `watch.hang_timeout_s=3`, `test.png`, `data.batch(x)`
$ samebits train digits optim.leanring_rate=0.1
config error: optim.leanring_rate is not a setting
"""
    assert unknown_names(text) == []
