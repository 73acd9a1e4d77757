"""`samebits export`: a trained model as one file, verified before it is renamed into place."""

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.evaluate import print_weights
from samebits.cli.options import (
    Checkpoint,
    Debug,
    Json,
    MachineOverrides,
    Model,
    Preset,
    json_text,
    line_text,
    path_option,
)

To = Annotated[str, typer.Option("--to", metavar="FORMAT", help="safetensors, onnx or torch-export.")]
Out = Annotated[Path | None, path_option("--out", "FILE", "File to write; default: model.ENDING in the run folder.")]


def export(
    run: Model,
    overrides: MachineOverrides = None,
    to: To = "safetensors",
    out: Out = None,
    preset: Preset = None,
    checkpoint: Checkpoint = "last",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a trained model to one file, and check its outputs.

    The file must return the model's outputs for a sample input.
    """
    from samebits.inference import export

    made = export.export(run, to, out, overrides or [], checkpoint, preset=preset)
    print_weights(run, checkpoint)
    if as_json:
        metadata = {"file": str(made.path), "bytes": made.num_bytes, "difference": made.difference,
                 "allowed": made.allowed, **made.metadata}  # fmt: skip
        print(json_text(metadata))
        return
    own = [name for name in made.metadata if name not in ("samebits", "recipe", "input")]
    print(f"{line_text(str(made.path))}  {made.num_bytes / 1e6:.1f} MB, fp32")
    print(f"  input    (batch, {', '.join(map(str, made.input_shape))})")
    print(f"  checked  largest difference {made.difference:.2g} of the largest output, {made.allowed:.2g} at most")
    print(f"  metadata {line_text(', '.join(own)) or 'nothing: the recipe has no metadata'}")
