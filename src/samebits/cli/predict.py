"""`samebits predict`: predictions for the user's files. Needs only the run folder, or a file of weights."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from samebits.cli.evaluate import print_weights
from samebits.cli.options import Checkpoint, Debug, Json, Model, Preset, json_text, line_text, path_option
from samebits.errors import DataError

Arguments = Annotated[
    list[str],
    typer.Argument(metavar="FILE", help="Files, and folders of them; settings as KEY=VALUE.", show_default=False),
]
Draw = Annotated[
    Path | None, path_option("--draw", "PATH", "Draw the predictions: into a file, or into a folder for several.")
]

_SHARES = ("probability", "confidence", "share")
_MOST_ROWS = 10  # of a table
_MOST_TABLES = 10  # with more files, one line each is easier to read
_WIDEST_NAME = 40


def predict(
    run: Model,
    files: Arguments,
    draw: Draw = None,
    preset: Preset = None,
    checkpoint: Checkpoint = "last",
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Predict for files. A file that cannot be read is named, and the others are processed."""
    from samebits.inference import predict
    from samebits.inference.trained_model import TrainedModel

    paths = [Path(file) for file in files if not _is_setting(file)]
    settings = [file for file in files if _is_setting(file)]
    if not paths:
        raise DataError("no file was given", fix=f"Name a file: samebits predict {shlex.quote(str(run))} FILE")
    files_asked = predict.expand(paths)
    width = min(max(len(str(file)) for file in files_asked), _WIDEST_NAME)
    num_bad, is_named = 0, False
    for answer in predict.predictions(TrainedModel(run, settings, checkpoint, preset), files_asked, draw):
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
                f"{answer.file!s:<{width}}", answer.prediction, tables=len(files_asked) <= _MOST_TABLES
            )
            print("\n".join(map(line_text, lines)), flush=True)
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
    plain = [f"{name} {_figure(name, value)}" for name, value in prediction.items() if _is_plain(value)]
    deep = [
        f"{name} {len(value)}" for name, value in prediction.items() if not _is_plain(value) and not _is_table(value)
    ]
    yield "  ".join([file, *plain, *deep])
    for value in prediction.values():
        if tables and _is_table(value):
            yield from _table(value)


def _table(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [[_figure(name, record.get(name, "")) for name in names] for record in records[:_MOST_ROWS]]
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
        and all(isinstance(record, Mapping) and all(map(_is_plain, record.values())) for record in value)
    )
