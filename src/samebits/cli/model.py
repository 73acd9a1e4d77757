"""`samebits eval`, `predict`, `export`, `push` and `pull`: what a trained model is used for."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from samebits.cli.options import (
    AnySigner,
    Checkpoint,
    Debug,
    Json,
    MachineOverrides,
    Model,
    Preset,
    Procs,
    Run,
    argument,
    json_text,
    option,
    path_option,
)
from samebits.errors import ConfigError, DataError, one_line, printable

# `samebits eval`: needs only the run folder, or a file of weights and the name of its model.


def print_weights(run: Path, checkpoint: str) -> None:
    """Name the weights that a command has taken, on standard error: standard output is for its result."""
    from samebits.inference.trained_model import describe_weights

    if line := describe_weights(run, checkpoint):
        print(line, file=sys.stderr, flush=True)


def evaluate(
    run: Model,
    overrides: MachineOverrides = None,
    preset: Preset = None,
    procs: Procs = None,
    checkpoint: Checkpoint = "last",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate a model on the validation set, each sample once."""
    from samebits.inference import predict

    metrics = predict.evaluate(run, overrides or [], procs, checkpoint, preset=preset)
    if not metrics:  # another rank than 0, which prints nothing
        return
    print_weights(run, checkpoint)
    if as_json:
        print(json.dumps(metrics))
        return
    from samebits.report.format import metric_value

    width = max((len(printable(name)) for name in metrics), default=0)
    for name, value in metrics.items():
        is_none = metric_value(name, value) == "none"  # an average over no ground truth
        text = "none" if is_none else int(value) if value.is_integer() else f"{value:.6g}"
        print(f"{printable(name):<{width}}  {text}")  # names of classes are a stranger's


# `samebits predict`: predictions for the user's files. Needs only the run folder, or a file of weights.


Arguments = Annotated[
    list[str] | None,
    argument("FILE", "Files, and folders of them; settings as KEY=VALUE."),
]
Draw = Annotated[
    Path | None,
    path_option(
        "--draw", "PATH", "Draw the predictions: into a file, or into a folder for several."
    ),
]

_SHARES = ("probability", "confidence", "share")
_MOST_ROWS = 10  # of a table
_MOST_TABLES = 10  # with more files, one line each is easier to read
_WIDEST_NAME = 40


def predict(
    run: Model,
    files: Arguments = None,
    draw: Draw = None,
    preset: Preset = None,
    checkpoint: Checkpoint = "last",
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Predict for files. A file that cannot be read is named, and the others are processed."""
    from samebits.data.names import ENDINGS
    from samebits.inference import predict
    from samebits.inference.trained_model import TrainedModel

    paths = [Path(file) for file in files or [] if not _is_setting(file)]
    settings = [file for file in files or [] if _is_setting(file)]
    quoted = shlex.quote(str(run))
    if run.suffix.lower() in ENDINGS:
        rest = shlex.join([str(path) for path in (run, *paths)])
        raise ConfigError(
            f"{run} is an image, not a run", fix=f"Name the run first: samebits predict RUN {rest}"
        )
    if not paths:
        raise ConfigError("no file was given", fix=f"Name a file: samebits predict {quoted} FILE")
    files_asked = predict.expand(paths)
    width = min(max(len(str(file)) for file in files_asked), _WIDEST_NAME)
    num_bad = 0
    is_named = False
    for answer in predict.predictions(
        TrainedModel(run, settings, checkpoint, preset), files_asked, draw
    ):
        if not is_named and answer.error is None:  # not before the weights are read, which may fail
            print_weights(run, checkpoint)
            is_named = True
        num_bad += answer.error is not None
        if as_json:
            print(json_text({"file": str(answer.file), **answer.prediction}), flush=True)
        elif answer.error is not None:
            print(answer.error, file=sys.stderr, flush=True)
        else:
            lines = answer_lines(
                f"{answer.file!s:<{width}}",
                answer.prediction,
                tables=len(files_asked) <= _MOST_TABLES,
            )
            print("\n".join(map(one_line, lines)), flush=True)
    return DataError.exit_code if num_bad else 0


def _is_setting(text: str) -> bool:
    """Return whether an argument is `key=value` and not a file's name."""
    key, equals, _ = text.partition("=")
    return bool(equals) and key.replace(".", "_").isidentifier() and not Path(text).exists()


def answer_lines(file: str, prediction: Mapping[str, Any], *, tables: bool) -> Iterator[str]:
    """Format a prediction: plain values on the file's line, lists of records as tables below it.

    Deeper values are for programs (--json); here they are only counted.

    Args:
        file: Start of the first line: the file, padded so that the lines are aligned.
        prediction: Values by name, as `to_prediction` of the recipe returns them.
        tables: Whether to print the tables; otherwise lists of records are left out.
    """
    plain = [
        f"{name} {_figure(name, value)}" for name, value in prediction.items() if _is_plain(value)
    ]
    deep = [
        f"{name} {len(value)}"
        for name, value in prediction.items()
        if not _is_plain(value) and not _is_table(value)
    ]
    yield "  ".join([file, *plain, *deep])
    for value in prediction.values():
        if tables and _is_table(value):
            yield from _table(value)


def _table(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [
        [_figure(name, record.get(name, "")) for name in names] for record in records[:_MOST_ROWS]
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(names))]
    numbers = [all(not isinstance(record.get(name), str) for record in records) for name in names]
    for row in rows:
        cells = zip(row, widths, numbers, strict=True)
        yield f"    {'  '.join(f'{c:>{width}}' if is_number else f'{c:<{width}}' for c, width, is_number in cells)}"
    if len(records) > _MOST_ROWS:
        yield f"    and {len(records) - _MOST_ROWS} more (see --json)"


def _figure(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if name in _SHARES and 0 <= value <= 1:
            return f"{value:.2%}"
        return str(int(value)) if value.is_integer() else f"{value:.6g}"
    return str(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(record, Mapping) and all(map(_is_plain, record.values())) for record in value
        )
    )


# `samebits export`: a trained model as one file, verified before it is renamed into place.


To = Annotated[str, option("FORMAT", "safetensors, onnx or torch-export.", "--to")]
Out = Annotated[
    Path | None,
    path_option("--out", "FILE", "File to write; default: model.ENDING in the run folder."),
]


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
    print(f"{one_line(str(made.path))}  {made.num_bytes / 1e6:.1f} MB, fp32")
    print(f"  input    (batch, {', '.join(map(str, made.input_shape))})")
    print(
        f"  checked  largest difference {made.difference:.2g} of the largest output, {made.allowed:.2g} at most"
    )
    print(f"  metadata {one_line(', '.join(own)) or 'nothing: the recipe has no metadata'}")


# `samebits push` and `samebits pull`: trained models in Hugging Face's format, in a folder or on the Hub.


Target = Annotated[
    str,
    argument("TARGET", "A new folder; or hf://OWNER/NAME."),
]
Source = Annotated[
    str,
    argument("SOURCE", "A folder; or hf://OWNER/NAME[@REVISION]."),
]
SignKey = Annotated[
    Path | None, path_option("--sign-key", "FILE", "Sign the model with this private key (PEM).")
]
NewFolder = Annotated[Path, path_option("--out", "DIR", "New folder for the model.")]


def push(run: Run, target: Target, sign_key: SignKey = None, debug: Debug = False) -> None:
    """Publish a trained model to a folder or the Hugging Face Hub.

    It gets a card, its provenance, and a signature if there is a key. Only hf:// uses the network.
    """
    from samebits.inference.hub import push

    print(f"model      {one_line(push(run, target, sign_key))}")


def pull(
    source: Source, out: NewFolder, any_signer: AnySigner = False, debug: Debug = False
) -> None:
    """Get a published model, for predict, eval, export and verify.

    Names who signed it; `samebits trust` has the keys that you trust. Only hf:// uses the network.
    """
    from samebits.inference.hub import pull, signature_of

    folder = pull(source, out, any_signer)
    signature = signature_of(folder)
    print(f"model      {one_line(str(folder))}")
    print(f"signer     {one_line(signature.problem or signature.text)}")
    print(f"           samebits predict {one_line(str(folder))} FILE")
