"""Reference pages, generated from what the program itself knows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import samebits

Page = tuple[str, str]


def pages() -> Iterator[Page]:
    """Every generated page: its name below the site's root, and its Markdown."""
    yield "reference/cli.md", cli_page()
    yield "reference/api.md", api_page()
    yield from settings_pages()


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
    context = command.context_class(command, info_name=path, terminal_width=78, max_content_width=78)
    return str(command.get_help(context)).rstrip()


def _command(path: str, command: Any) -> list[str]:
    context = command.context_class(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(context))
    blocks = [f"## {path}\n", f"```text\n{path} {usage}\n```\n", f"{inspect.cleandoc(command.help or '')}\n"]
    blocks.append(f"```{{program}} {path}\n```\n")
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or getattr(parameter, "hidden", False):
            continue
        names, meaning = record
        names = re.sub(r"\s+", " ", names)
        if parameter.param_type_name == "argument":
            blocks.append(f"- `{names}`: {meaning}\n")
        else:
            blocks.append(f"```{{option}} {names}\n{meaning}\n```\n")
    return blocks


def api_page() -> str:
    """What `samebits.__all__` names, from the docstrings."""
    functions, classes, errors = [], [], []
    for name in sorted(samebits.__all__, key=str.lower):
        thing = getattr(samebits, name)
        if inspect.isclass(thing):
            (errors if issubclass(thing, BaseException) else classes).append(name)
        elif callable(thing):
            functions.append(name)
    blocks = [
        "# Python API\n",
        "Everything that `import samebits` offers. Other modules are not public and may change in any version.\n",
        "```python\nimport samebits\n\n"
        'run = samebits.train("digits", {"epochs": 3}, procs=2)\n'
        "print(run.metrics, run.weights_sha256)\n```\n",
    ]
    for title, names in (("Functions", functions), ("Classes", classes), ("Errors", errors)):
        if not names:
            continue
        blocks.append(f"## {title}\n")
        for name in names:
            kind = "autofunction" if title == "Functions" else "autoclass" if title == "Classes" else "autoexception"
            options = "" if title == "Functions" else "\n   :members:"
            thing = getattr(samebits, name)
            # samebits.launch is a package too, which sphinx would describe.
            place = f"samebits.{name}" if not inspect.ismodule(thing) else f"{thing.__name__}.function.{name}"
            blocks.append(f"### {name}\n\n```{{eval-rst}}\n.. {kind}:: {place}{options}\n```\n")
    return "\n".join(blocks)


def settings_pages() -> Iterator[Page]:
    """A page with one table for each recipe, and one that leads to them."""
    from samebits.recipes.catalog import list_presets, list_recipes

    lines = [
        "# Settings\n",
        "Every setting of each recipe: its type, its default, what it controls, and whether it may change at a resume. "
        "Settings that may not change determine the result.\n",
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
    yield "reference/settings.md", "\n".join([*lines, ""])


def _settings_page(recipe: str) -> str:
    from samebits.config import describe
    from samebits.config.load import preview
    from samebits.provenance.same_run import is_free
    from samebits.recipes.catalog import find

    found = find(recipe)
    values, _ = preview(found.config_class, found.layers, [])
    blocks = [
        f"# Settings of {recipe}\n",
        f"Defaults are those of the preset `{recipe}`; `samebits config {recipe}/PRESET` shows another preset's.\n",
        "Settings of evaluation may change at a resume unless `stop_early.patience` is set.\n",
    ]
    head = "| setting | type | default | what it controls | at a resume |\n|---|---|---|---|---|"
    table = [head]
    for row in describe.table(found.config_class, values):
        if row.key == "recipe":
            continue
        if row.type == "section":
            blocks += [*table, ""] if len(table) > 1 else []
            table = [f"## {row.key}\n\n{_cell(row.meaning).capitalize()}.\n\n{head}"]
            continue
        default = f"`{row.default}`" if row.default else "needed"
        anchor = re.sub(r"[._]", "-", row.key)
        cells = [f"[`{row.key}`]{{#{anchor}}}", _cell(row.type), default.replace("|", "\\|"), _cell(row.meaning)]
        cells.append("may change" if is_free(row.key) else "")
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join([*blocks, *table, ""])


def _cell(text: str) -> str:
    """Text that may stand in a table's cell, taken literally but for code in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*_<>\[\]{}\\$~])", r"\\\1", part) for part in parts[::2]]
    text = "".join(parts).replace("|", "\\|").replace("\n", " ")
    return re.sub(r"\bdocs/([\w\\-]+)\.md\b", r"[\1](../\1.md)", text)
