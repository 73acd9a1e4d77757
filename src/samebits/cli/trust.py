"""`samebits trust`: let a recipe or tracker file run where only a YAML file or a run folder names it."""

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import Debug
from samebits.config.given import given_path

RecipeFile = Annotated[str, typer.Argument(metavar="FILE", help="A recipe file (.py).", show_default=False)]


def trust(file: RecipeFile, debug: Debug = False) -> None:
    """Let a file with a recipe or tracker run without being named.

    It then runs when only a YAML file or a run folder names it. Valid for this file at this path until it changes. A
    file that is named on the command line needs no trust.
    """
    from samebits.errors import ConfigError
    from samebits.recipes.trust import list_path, trust

    path = given_path(Path(file), "FILE")
    if path.suffix != ".py":
        raise ConfigError(
            f"{path} is not a recipe file", allowed="a Python file: NAME.py", fix="Name the Python file of the recipe."
        )
    sha256 = trust(path)
    print(f"trusted: {path.resolve()}\nsha256   {sha256}\nlist     {list_path()}")
