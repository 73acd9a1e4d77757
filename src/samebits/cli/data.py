"""`samebits data make`: synthetic data to try a recipe with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebits.cli.options import Debug, Overrides, command_group, path_option
from samebits.errors import ConfigError, cannot_write_result
from samebits.scratch import OWNER, scratch_folder, sweep

if TYPE_CHECKING:
    from samebits.recipes.makers import Maker

app = command_group("Make synthetic data to train on.")

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe that reads the data: classify or segment.")]
Out = Annotated[Path | None, path_option("--out", "DIR", "A new or empty folder. Default: show the settings.")]


# With a callback, typer keeps `make` as a command although it is the only one.
@app.callback()
def _root() -> None:
    """Make synthetic data to train on."""


@app.command("make")
def make(recipe: RecipeName, overrides: Overrides = None, out: Out = None, debug: Debug = False) -> int:
    """Make a synthetic dataset, in the format that RECIPE reads."""
    from samebits.config.load import load
    from samebits.recipes.makers import find_maker

    maker = find_maker(recipe)
    try:
        config = load(maker.config_class, [], overrides or []).config
    except ConfigError as error:
        fix = "\n".join(filter(None, [error.slots.get("fix"), f"For all settings: samebits data make {maker.recipe}"]))
        raise error.with_slots(fix=fix) from None
    if out is None:
        from samebits.report.console import Console

        console = Console(sys.stdout, strict=True)
        console.say("\n".join(_settings_lines(maker, console.width)))
        return ConfigError.exit_code
    with _new_folder(out) as folder:
        text = maker.make(config, folder)
    print(text.replace(f"/{folder.name}", ""))  # with the final folder in place of the temporary one
    return 0


def _settings_lines(maker: Maker, width: int) -> Iterator[str]:
    from samebits.cli.config import hanging
    from samebits.config import describe

    rows = describe.table(maker.config_class, describe.defaults(maker.config_class))
    yield f"samebits data make {maker.recipe} --out DIR"
    yield ""
    first, second = (max(map(len, texts)) for texts in zip(*((row.key, row.default) for row in rows), strict=True))
    for row in rows:
        head = f"{row.key:<{first}}  {row.default or '(required)':<{second}}  "
        yield from hanging(head, f"{row.meaning} ({row.type})", width)


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder whose content becomes that of `out`, which is new or empty.

    The content is moved when it is complete. After an error, `out` is as it was.
    """
    try:
        if out.is_dir():
            sweep(out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out} is {'not empty' if out.is_dir() else 'a file'}", fix="Name a new folder.")
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        try:
            out.mkdir(parents=True, exist_ok=True)
            with scratch_folder(out) as folder:
                yield folder
                for path in folder.iterdir():
                    # The owner file is locked, and is removed with its folder.
                    if path.name != OWNER:
                        path.rename(out / path.name)
        # BaseException: Ctrl-C too must not leave the folders that were made here.
        except BaseException:
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
    except OSError as error:
        raise cannot_write_result(out, error) from None
