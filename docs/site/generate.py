"""Reference pages, generated from what the program itself knows, and lists of pages: `make reference`.

They are plain Markdown and committed, since readers of the repository have no site. `tests/house/test_reference.py`
compares them with the code.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import navigation
from api_page import api_page

Page = tuple[str, str]
DOCS = Path(__file__).resolve().parents[1]


def pages() -> Iterator[Page]:
    """Every generated page: its name below docs/, and its Markdown."""
    reference = [("reference/cli.md", cli_page()), ("reference/api.md", api_page()), *settings_pages()]
    for name, text in [*reference, *navigation.section_pages(DOCS, dict(reference))]:
        title, rest = text.split("\n", 1)
        yield name, f"{title}\n\n{navigation.GENERATED}\n{rest.rstrip()}\n"


def outdated() -> list[str]:
    """Generated pages that differ from the committed ones, and committed ones that are not generated."""
    expected = {DOCS / name: text for name, text in pages()}
    committed = [
        path for path in sorted(DOCS.rglob("*.md")) if navigation.GENERATED in path.read_text(encoding="utf-8")
    ]
    wrong = [path for path, text in expected.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    wrong += [path for path in committed if path not in expected]
    return [f"docs/{path.relative_to(DOCS).as_posix()}" for path in wrong]


def write() -> None:
    """Write all generated pages into docs/, and remove those of recipes that are gone."""
    expected = dict(pages())
    for path in sorted((DOCS / "reference").glob("*.md")):
        if f"reference/{path.name}" not in expected:
            path.unlink()
    for name, text in expected.items():
        (DOCS / name).write_text(text, encoding="utf-8")


def cli_page() -> str:
    """Every command and option, from typer."""
    import typer

    from samebits.cli.app import app

    root = typer.main.get_command(app)
    blocks = [
        "# Command line\n",
        "Every command and option of `samebits`. `samebits COMMAND --help` prints the same in a terminal.\n",
        "```console\n$ samebits --help\n" + _help(root, "samebits") + "\n```\n",
    ]
    for path, command in _commands(root, "samebits"):
        blocks += _command(path, command)
    return "\n".join(blocks)


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}", command


def _help(command: Any, path: str) -> str:
    from samebits.cli.options import CONTEXT

    names = CONTEXT["help_option_names"]
    context = command.context_class(
        command, info_name=path, terminal_width=78, max_content_width=78, help_option_names=names
    )
    return str(command.get_help(context)).rstrip()


def _command(path: str, command: Any) -> list[str]:
    context = command.context_class(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    blocks = [f"## {path}\n", f"```text\n{path} {usage}\n```\n", f"{inspect.cleandoc(command.help or '')}\n"]
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or getattr(parameter, "hidden", False):
            continue
        names, meaning = (re.sub(r"\s+", " ", part) for part in record)
        names = f"`{names}`".replace("|", "\\|")
        rows.append(f"| {names} | {_cell(meaning)} |")
    return [*blocks, "\n".join(["| argument or option | meaning |", "|---|---|", *rows, ""])]


def settings_pages() -> Iterator[Page]:
    """A page with the settings that all recipes share, and one for each recipe with its own."""
    from samebits.config import describe
    from samebits.config.schema import RunConfig
    from samebits.recipes.catalog import list_presets, list_recipes

    lines = [
        "# Settings\n",
        "The settings that all recipes share: type, default, what each controls, and whether it may change at a "
        "resume. Settings that may not change determine the result. Each recipe has a page with its own settings, and "
        "with the defaults of these that it changes.\n",
        "```console\n$ samebits train digits epochs=3 optim.lr=0.05     # on the command line\n"
        "$ samebits config digits                           # the same table in a terminal\n```\n",
        "In a YAML file, sections are nested:\n",
        "```yaml\nrecipe: mnist/digits\nepochs: 3\noptim:\n  lr: 0.05\n```\n",
        "A later layer overrides an earlier one: the recipe's preset, your YAML file, the command line. "
        "`samebits config --schema NAME` prints a JSON Schema for editors.\n",
        "| recipe | presets |\n|---|---|",
    ]
    for recipe in list_recipes():
        names = ", ".join(f"`{preset.name}`" for preset in list_presets(recipe))
        lines.append(f"| [{recipe}](settings-{recipe}.md) | {names} |")
        yield f"reference/settings-{recipe}.md", _settings_page(recipe)
    lines.append("\nSettings of evaluation may change at a resume unless `stop_early.patience` is set.\n")
    shared = describe.table(RunConfig, describe.defaults(RunConfig))
    yield "reference/settings.md", "\n".join([*lines, "## Of the run\n", *_tables(shared), ""])


def _settings_page(recipe: str) -> str:
    from samebits.config import describe
    from samebits.config.load import preview
    from samebits.config.schema import RunConfig
    from samebits.recipes.catalog import find

    found = find(recipe)
    values, _ = preview(found.config_class, found.layers, [])
    shared = {row.key: row for row in describe.table(RunConfig, describe.defaults(RunConfig))}
    rows = describe.table(found.config_class, values)
    # A section is written where a setting of it is.
    own = [row for row in rows if row.type == "section" or _is_own(row, shared.get(row.key))]
    blocks = [
        f"# Settings of {recipe}\n",
        f"The settings that the recipe `{recipe}` has of its own. Defaults are those of the preset `{recipe}`; "
        f"`samebits config {recipe}/PRESET` shows another preset's.\n",
        *_tables(own),
        "## Defaults of shared settings\n",
        f"All other settings are those of [every recipe](settings.md). The preset `{recipe}` changes these defaults:\n",
        "| setting | default |\n|---|---|",
    ]
    for row in rows:
        if row not in own and row.key != "recipe" and row.default != shared[row.key].default:
            section = row.key.rpartition(".")[0] or "of-the-run"
            blocks.append(f"| [`{row.key}`](settings.md#{section}) | `{row.default}` |")
    return "\n".join([*blocks, ""])


def _is_own(row: Any, shared: Any) -> bool:
    return shared is None or (row.type, row.meaning) != (shared.type, shared.meaning)


def _tables(rows: list[Any]) -> list[str]:
    """A table of the settings, and one below a heading for each section."""
    from samebits.provenance.identity import is_free

    blocks: list[str] = []
    head = "| setting | type | default | what it controls | at a resume |\n|---|---|---|---|---|"
    table = [head]
    for row in rows:
        if row.key == "recipe":
            continue
        if row.type == "section":
            blocks += [*table, ""] if len(table) > 1 else []
            table = [f"## {row.key}\n\n{_cell(row.meaning)}\n\n{head}"]
            continue
        default = f"`{row.default}`" if row.default else "needed"
        anchor = re.sub(r"[._]", "-", row.key)
        cells = [f'<a id="{anchor}"></a>`{row.key}`', _cell(row.type), default.replace("|", "\\|"), _cell(row.meaning)]
        cells.append("may change" if is_free(row.key) else "")
        table.append(f"| {' | '.join(cells)} |")
    return [*blocks, *(table if len(table) > 1 else []), ""]


def _cell(text: str) -> str:
    """Text that may stand in a table's cell, taken literally but for code in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*_<>\[\]{}\\$~])", r"\\\1", part) for part in parts[::2]]
    text = "".join(parts).replace("|", "\\|").replace("\n", " ")
    return re.sub(r"\bdocs/([\w\\-]+)\.md\b", r"[\1](../\1.md)", text)


if __name__ == "__main__":
    write()
