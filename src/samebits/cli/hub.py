"""`samebits push` and `samebits pull`: trained models in Hugging Face's format, in a folder or on the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.options import Debug, line_text, path_option

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="A new folder; or hf://OWNER/NAME.", show_default=False)]
Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A folder; or hf://OWNER/NAME[@REVISION].", show_default=False)
]
Out = Annotated[Path, path_option("--out", "DIR", "New folder for the model.")]


def push(run: Run, target: Target, debug: Debug = False) -> None:
    """Publish a trained model to a folder or the Hugging Face Hub.

    It gets a card and its provenance. Only hf:// uses the network.
    """
    from samebits.inference.hub import push

    print(f"model      {line_text(push(run, target))}")


def pull(source: Source, out: Out, debug: Debug = False) -> None:
    """Get a published model as a folder for predict, eval and export.

    Only hf:// uses the network.
    """
    from samebits.inference.hub import pull

    folder = pull(source, out)
    print(f"model      {line_text(str(folder))}")
    print(f"           samebits predict {line_text(str(folder))} FILE")
