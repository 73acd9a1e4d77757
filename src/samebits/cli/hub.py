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
SignKey = Annotated[Path | None, path_option("--sign-key", "FILE", "Sign the model with this private key (PEM).")]
AnySigner = Annotated[bool, typer.Option("--any-signer", help="Take a model that no key you trust has signed.")]
Out = Annotated[Path, path_option("--out", "DIR", "New folder for the model.")]


def push(run: Run, target: Target, sign_key: SignKey = None, debug: Debug = False) -> None:
    """Publish a trained model to a folder or the Hugging Face Hub.

    It gets a card, its provenance, and a signature if there is a key. Only hf:// uses the network.
    """
    from samebits.inference.hub import push

    print(f"model      {line_text(push(run, target, sign_key))}")


def pull(source: Source, out: Out, any_signer: AnySigner = False, debug: Debug = False) -> None:
    """Get a published model, for predict, eval, export and verify.

    Names who signed it; `samebits trust` has the keys that you trust. Only hf:// uses the network.
    """
    from samebits.inference.hub import pull, signature_of

    folder = pull(source, out, any_signer)
    signature = signature_of(folder)
    print(f"model      {line_text(str(folder))}")
    print(f"signer     {line_text(signature.problem or signature.text)}")
    print(f"           samebits predict {line_text(str(folder))} FILE")
