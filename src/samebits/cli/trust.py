"""`samebits trust`: recipe and tracker files that may run without being named, and keys of those who sign models."""

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import Debug
from samebits.config.given import given_path

TrustedFile = Annotated[
    str, typer.Argument(metavar="FILE", help="A recipe file (.py), or a public key (.pub).", show_default=False)
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
        print(f"trusted: {path.stem}, as a signer of models\nkey      {fingerprint}\ncopy     {copy}")
        return
    if path.suffix != ".py":
        raise ConfigError(
            f"{path} is neither a recipe file nor a public key",
            allowed="NAME.py or NAME.pub",
            fix="Name the Python file of the recipe, or the file of the key.",
        )
    sha256 = trust(path)
    print(f"trusted: {path.resolve()}\nsha256   {sha256}\nlist     {list_path()}")
