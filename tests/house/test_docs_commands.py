"""Commands, options and settings that the documents name exist."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

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
