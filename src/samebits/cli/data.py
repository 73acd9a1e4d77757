"""`samebits data make`: synthetic data to try a recipe with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebits.cli.options import Debug, Overrides, command_group, path_option
from samebits.errors import ConfigError

if TYPE_CHECKING:
    from samebits.config.schema import Settings

app = command_group("Make synthetic data to train on.")

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Recipe that reads the data: classify or segment.")
]
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
    from samebits.cli.config import hanging
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
