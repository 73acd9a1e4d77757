"""`samebits config`, `trust` and `data`: settings, files that may run, and synthetic data."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from samebits.cli.options import Debug, Overrides, argument, command_group, flag, path_option
from samebits.config.given import given_path
from samebits.errors import ConfigError

if TYPE_CHECKING:
    from samebits.config.describe import Row
    from samebits.config.schema import Settings
    from samebits.recipes.catalog import RecipeSpec


# `samebits config` and `samebits trust`: settings, and files that may run.


# `samebits config`: the recipes and presets, and all settings of one.


SourceName = Annotated[
    str | None, argument("SOURCE", "A recipe, preset, YAML file or recipe file.")
]
AsSchema = Annotated[bool, flag("--schema", "Print JSON Schema of a YAML file, for editors.")]

_VALUE_WIDTH = 12
_MIN_TEXT = 20
_FIRM_SPACE = "\N{NO-BREAK SPACE}"


def config(
    source: SourceName = None,
    overrides: Overrides = None,
    schema: AsSchema = False,
    debug: Debug = False,
) -> None:
    """Show all settings: value, meaning and type. Without SOURCE: all recipes and presets."""
    if source is None:
        from samebits.report.console import Console

        console = Console(sys.stdout, strict=True)
        console.say("\n".join(_catalog_lines(console.width)))
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
    rows = describe.table(found.config_class, values)
    from samebits.report.console import Console

    console = Console(sys.stdout, strict=True)
    console.say("\n".join(_setting_lines(source, found, rows, changed, console.width)))


def _catalog_lines(width: int) -> Iterator[str]:
    from samebits.recipes.catalog import list_presets, list_recipes

    pairs = [(recipe, preset) for recipe in list_recipes() for preset in list_presets(recipe)]
    first = max((len(recipe) for recipe, _ in pairs), default=0)
    second = max((len(preset.name) for _, preset in pairs), default=0)
    last = None
    yield f"{'recipe':<{first}}  preset"
    for recipe, preset in pairs:
        head = f"{'' if recipe == last else recipe:<{max(first, 6)}}  {preset.name:<{max(second, 6)}}  "
        yield from hanging(head, preset.meaning, width)
        last = recipe
    yield ""
    yield "All settings of one: samebits config NAME    Train it: samebits train NAME"


def _setting_lines(
    source: str, found: RecipeSpec, rows: Sequence[Row], changed: Mapping[str, Any], width: int
) -> Iterator[str]:
    from pydantic_core import PydanticUndefined

    from samebits.config import describe

    key_width = max(len(row.key) for row in rows)
    base = found.recipe if found.preset_name is None else f"{found.recipe}/{found.preset_name}"
    yield from hanging(
        "", f"{source}: all settings with their values, meanings and types. Based on {base}.", width
    )
    any_changed = False
    yield ""
    for row in rows:
        if row.key == "recipe":
            continue
        if row.type == "section":
            yield ""
            yield from hanging(f"{row.key}  ", row.meaning, width)
            continue
        is_changed = describe.at(changed, row.key.split(".")) is not PydanticUndefined
        any_changed = any_changed or is_changed
        value = ("*" if is_changed else " ") + (row.default or "(required)")
        head = f"{row.key:<{key_width}} {value:<{_VALUE_WIDTH + 1}}  "
        # A short type stays on one line: its spaces do not break.
        kind = row.type.replace(" ", _FIRM_SPACE) if len(row.type) <= 24 else row.type
        text = f"{row.meaning} ({kind})"
        if len(value) > _VALUE_WIDTH + 1:  # a long value has its own line
            yield head.rstrip()
            head = " " * (key_width + _VALUE_WIDTH + 4)
        yield from hanging(head, text, width)
    yield ""
    if any_changed:
        yield "* differs from the preset"
    yield f"To set one:      samebits train {source} optim.lr=0.1"
    yield f"In a YAML file:  recipe: {base}"


def hanging(head: str, text: str, width: int) -> list[str]:
    """Wrap a text behind a head, with further lines indented to its start."""
    if width - len(head) < _MIN_TEXT:  # a narrow terminal: the text below the head
        return [head.rstrip(), *hanging(" " * 4, text, max(width, _MIN_TEXT + 4))]
    lines = textwrap.wrap(
        text, width - len(head), break_long_words=False, break_on_hyphens=False
    ) or [""]
    lines = [line.replace(_FIRM_SPACE, " ") for line in lines]
    return [
        f"{head if number == 0 else ' ' * len(head)}{line}".rstrip()
        for number, line in enumerate(lines)
    ]


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
    from samebits.errors import ConfigError
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


app = command_group("Make synthetic data to train on.")

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
        from samebits.report.console import Console

        console = Console(sys.stdout, strict=True)
        console.say("\n".join(_settings_lines(recipe, config_class, console.width)))
        return ConfigError.exit_code
    from samebits.storage.run_folder import folder_to_fill

    with folder_to_fill(out) as folder:
        text = make_data(recipe, config, folder)
    print(text.replace(str(folder), str(out)))
    return 0


def _settings_lines(recipe: str, config_class: type[Settings], width: int) -> Iterator[str]:
    from samebits.config import describe

    rows = describe.table(config_class, describe.defaults(config_class))
    yield f"samebits data make {recipe} --out DIR"
    yield ""
    first, second = (
        max(map(len, texts))
        for texts in zip(*((row.key, row.default) for row in rows), strict=True)
    )
    for row in rows:
        head = f"{row.key:<{first}}  {row.default or '(required)':<{second}}  "
        yield from hanging(head, f"{row.meaning} ({row.type})", width)
