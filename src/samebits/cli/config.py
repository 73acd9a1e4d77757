"""`samebits config`, `trust` and `data`: settings, files that may run, and synthetic data."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samebits.cli.options import CONTEXT, Commands, Debug, Overrides, argument, flag, path_option
from samebits.config.given import given_path
from samebits.errors import ConfigError, printable

if TYPE_CHECKING:
    from rich.table import Table

    from samebits.config.describe import Row


# `samebits config` and `samebits trust`: settings, and files that may run.


# `samebits config`: the recipes and presets, and all settings of one.


SourceName = Annotated[
    str | None, argument("SOURCE", "A recipe, preset, YAML file or recipe file.")
]
AsSchema = Annotated[bool, flag("--schema", "Print JSON Schema of a YAML file, for editors.")]

_VALUE_COLUMNS = 15
_TEXT_COLUMNS = 20


def config(
    source: SourceName = None,
    overrides: Overrides = None,
    schema: AsSchema = False,
    debug: Debug = False,
) -> None:
    """Show all settings: value, meaning and type. Without SOURCE: all recipes and presets."""
    from samebits.report.console import Console

    console = Console(sys.stdout, strict=True)
    if source is None:
        console.draw(_catalog())
        console.say("\nAll settings of one: samebits config NAME    Train it: samebits train NAME")
        return
    from samebits.config import describe
    from samebits.config.load import preview
    from samebits.recipes.catalog import find

    found = find(source)
    values, changed = preview(found.config_class, found.layers, overrides or [])
    if schema:
        print(
            json.dumps(
                describe.schema(found.config_class, values, f"samebits {found.name}"), indent=2
            )
        )
        return
    base = found.recipe if found.preset_name is None else f"{found.recipe}/{found.preset_name}"
    console.say(f"{source}: all settings, based on {base}")
    console.draw(_settings(describe.table(found.config_class, values), changed))
    console.say("\n* differs from the preset" if changed else "")
    console.say(f"To set one:      samebits train {source} optim.lr=0.1")
    console.say(f"In a YAML file:  recipe: {base}")


def _catalog() -> Table:
    from samebits.recipes.catalog import list_presets, list_recipes

    table = _grid("recipe", "preset")
    for recipe in list_recipes():
        for number, preset in enumerate(list_presets(recipe)):
            table.add_row("" if number else recipe, preset.name, preset.meaning)
    return table


def _settings(rows: Sequence[Row], changed: Mapping[str, Any]) -> Table:
    """Lay out settings with value, meaning and type; `changed`: those that get a star, as nested values."""
    from pydantic_core import PydanticUndefined

    from samebits.config import describe

    table = _grid()
    for row in rows:
        if row.type == "section":
            table.add_row()
            table.add_row(row.key, "", row.meaning)
        elif row.key != "recipe":
            is_changed = describe.at(changed, row.key.split(".")) is not PydanticUndefined
            value = ("*" if is_changed else " ") + (row.default or "(required)")
            table.add_row(row.key, value, printable(f"{row.meaning} ({row.type})"))
    return table


def _grid(*heads: str) -> Table:
    """Return a table of names, values and texts, which take the rest of the line."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    # The names of presets in one piece, to be copied; a value may be long.
    table.add_column(max_width=None if heads else _VALUE_COLUMNS, overflow="fold")
    table.add_column(min_width=_TEXT_COLUMNS)
    if heads:
        table.add_row(*heads)
    return table


# `samebits trust`: recipe and tracker files that may run without being named, and keys of those who sign models.


TrustedFile = Annotated[
    str,
    argument("FILE", "A recipe file (.py), or a public key (.pub)."),
]


def trust(file: TrustedFile, debug: Debug = False) -> None:
    """Trust a recipe file, or the key of a publisher who signs models.

    A file with a recipe or tracker then runs when only a YAML file or a run folder names it, at this path and until it
    changes. A file that is named on the command line needs no trust. With a key, pull and verify take the models that
    it signed, and refuse others.
    """
    from samebits.recipes.trust import list_path, trust

    path = given_path(Path(file), "FILE")
    if path.suffix == ".pub":
        from samebits.inference.signature import trust_key

        fingerprint, copy = trust_key(path)
        print(
            f"trusted: {path.stem}, as a signer of models\nkey      {fingerprint}\ncopy     {copy}"
        )
        return
    if path.suffix != ".py":
        raise ConfigError(
            f"{path} is neither a recipe file nor a public key",
            allowed="NAME.py or NAME.pub",
            fix="Name the Python file of the recipe, or the file of the key.",
        )
    sha256 = trust(path)
    print(f"trusted: {path.resolve()}\nsha256   {sha256}\nlist     {list_path()}")


# `samebits data make`: synthetic data to try a recipe with.


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make synthetic data to train on.",
    context_settings=CONTEXT,
)

RecipeName = Annotated[str, argument("RECIPE", "Recipe that reads the data: classify or segment.")]
Out = Annotated[
    Path | None, path_option("--out", "DIR", "A new or empty folder. Default: show the settings.")
]


# With a callback, typer keeps `make` as a command although it is the only one.
@app.callback()
def _root() -> None:
    """Make synthetic data to train on."""


@app.command("make")
def make(
    recipe: RecipeName, overrides: Overrides = None, out: Out = None, debug: Debug = False
) -> int:
    """Make a synthetic dataset, in the format that RECIPE reads."""
    from samebits.config.load import load
    from samebits.recipes.catalog import find_maker, make_data

    recipe, config_class = find_maker(recipe)
    try:
        config = load(config_class, [], overrides or []).config
    except ConfigError as error:
        fix = "\n".join(
            filter(None, [error.slots.get("fix"), f"For all settings: samebits data make {recipe}"])
        )
        raise error.with_slots(fix=fix) from None
    if out is None:
        from samebits.config import describe
        from samebits.report.console import Console

        console = Console(sys.stdout, strict=True)
        console.say(f"samebits data make {recipe} --out DIR")
        rows = describe.table(config_class, describe.defaults(config_class))
        console.draw(_settings(rows, changed={}))
        return ConfigError.exit_code
    from samebits.storage.run_folder import folder_to_fill

    with folder_to_fill(out) as folder:
        text = make_data(recipe, config, folder)
    print(text.replace(str(folder), str(out)))
    return 0
