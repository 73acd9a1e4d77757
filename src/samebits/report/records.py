"""The records of a run: `metrics.jsonl`, one line per record, and TensorBoard files."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from samebits.errors import cannot_write
from samebits.extras import require
from samebits.plain_file import no_link, open_plain, parse_json

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch.utils.tensorboard import SummaryWriter


FILE_NAME = "metrics.jsonl"
CHECKPOINT = "checkpoint"  # the kind of the records of checkpoints; they have no values
_MAX_LINE_BYTES = 1024 * 1024


class MetricsLog:
    """Appends records to a run folder, and flushes each line before the next.

    A failed write raises CheckpointError, as for all files of a run.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = True) -> None:
        self._path = folder / FILE_NAME
        self._tensorboard_folder = folder / "tensorboard" if tensorboard else None
        self._purge_step: int | None = None
        self._file: BinaryIO | None = None
        self._writer: SummaryWriter | None = None
        self._is_described = False
        # Checkpoints are noted by the thread that wrote them. Reentrant, since `truncate_after` calls `close`.
        self._lock = threading.RLock()
        self._shown: dict[str, int] = {}
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, step: int, epoch: float, values: Mapping[str, float | None]) -> None:
        """Append a record. Values that are not finite become null, as JSON has no NaN; None: not known."""
        finite = {
            name: value if value is None or math.isfinite(value) else None
            for name, value in values.items()
        }
        self._append({"kind": kind, "step": step, "epoch": epoch, **finite})
        if self._tensorboard_folder is not None:
            with _writing(self._tensorboard_folder):
                writer = self._open_tensorboard(self._tensorboard_folder)
                for name, value in values.items():
                    if value is not None:
                        writer.add_scalar(f"{kind}/{name}", value, step)

    def note_checkpoint(self, step: int, epoch: float, path: str) -> None:
        """Append the record of a checkpoint that is whole on disk. May be called in another thread."""
        self._append({"kind": CHECKPOINT, "step": step, "epoch": epoch, "path": path})

    def _append(self, record: Mapping[str, Any]) -> None:
        with _writing(self._path), self._lock:
            if self._file is None:
                # Append mode at the system: a write goes to the end of the file, whatever another process has added.
                self._file = open(self._path, "ab", opener=no_link)  # noqa: SIM115 - closed by `close`
            # NaN is no JSON, and other tools would refuse the line; `write` has replaced it by null.
            self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            # Flushed to the system at once: trackers follow the file, and
            # a killed process must not lose a record that it has made.
            self._file.flush()

    def describe(self, settings: Mapping[str, Any], metrics: Iterable[str]) -> None:
        """Write the run's row of TensorBoard's table of hyperparameters, whose metrics, of "eval", are the latest."""
        if self._tensorboard_folder is None or self._is_described:
            return
        from torch.utils.tensorboard.summary import hparams

        # torch writes a bool as the number 1, and refuses None and lists.
        plain = {
            name: value if type(value) in (int, float, str) else json.dumps(value)
            for name, value in settings.items()
        }
        with _writing(self._tensorboard_folder):
            writer = self._open_tensorboard(self._tensorboard_folder)._get_file_writer()
            # SummaryWriter.add_hparams would write them as a second run in a folder below.
            for summary in hparams(plain, {f"eval/{name}": 0.0 for name in metrics}):
                writer.add_summary(summary)
        self._is_described = True

    def show(self, folder: Path, step: int) -> None:
        """Add the PNG files of a folder to TensorBoard, under their names; those that are new since the last time."""
        if self._tensorboard_folder is None:
            return
        from samebits.data.images import read_rgb

        with _writing(self._tensorboard_folder):
            writer = self._open_tensorboard(self._tensorboard_folder)
            for path in sorted(folder.glob("*.png")):
                written = path.stat().st_mtime_ns
                if self._shown.get(path.name) == written:
                    continue
                self._shown[path.name] = written
                writer.add_image(path.stem, read_rgb(path), step, dataformats="HWC")

    def truncate_after(self, step: int, *, last_eval: int | None = None) -> None:
        """Remove records of later steps, which will be repeated, and a last line that a crash cut off.

        Evaluations stay up to `last_eval`, where that is an earlier step. TensorBoard hides its records of those steps.
        """
        with self._lock:  # a checkpoint may be noted meanwhile
            self.close()
            self._purge_step = step + 1
            if not os.path.lexists(self._path):
                return
            last = step if last_eval is None else last_eval
            part = self._path.with_suffix(".part")
            with _writing(self._path), open_plain(self._path) as old:
                part.unlink(missing_ok=True)  # it may be a link or a FIFO
                # "x": it fails if another process makes the same file, instead of writing into it.
                with part.open("xb") as new:
                    for line in lines_of(old):
                        record = record_in(line)
                        # An evaluation follows its step, so a run that stopped
                        # between the two repeats the evaluation alone.
                        if record is not None and float(record["step"]) <= (
                            last if record.get("kind") == "eval" else step
                        ):
                            new.write(line)
                    new.flush()
                    # On the disk before the rename: otherwise a power
                    # cut could leave an empty file under the final name.
                    os.fsync(new.fileno())
                part.replace(self._path)

    def close(self) -> None:
        """Flush and close all files."""
        with self._lock:
            file = self._file
            writer = self._writer
            self._file = self._writer = None
        with _writing(self._path.parent):
            try:
                if file is not None:
                    file.close()
            finally:
                # Also if the records could not be closed: TensorBoard's writer has a thread of its own.
                if writer is not None:
                    writer.close()

    def _open_tensorboard(self, folder: Path) -> SummaryWriter:
        if self._writer is None:
            # Imported late, since it takes a while: by the first record, all ranks are training.
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: TensorBoard ignores what an earlier process has written for the steps that are repeated.
            self._writer = SummaryWriter(str(folder), purge_step=self._purge_step, flush_secs=10)
        return self._writer


def read_records(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Read the records of a run folder in order, or those of one kind. Skips a truncated line."""
    return list(iterate_records(folder, kind))


def iterate_records(folder: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a run folder as `read_records` does, without holding all of them in memory."""
    path = folder / FILE_NAME
    if not path.exists():
        return
    with _writing(path), open_plain(path) as file:
        for line in lines_of(file):
            # Only those that may be of the kind are parsed: a run of weeks has millions of steps.
            if kind is None or f'"{kind}"'.encode() in line:
                record = record_in(line)
                if record is not None and kind in (None, record.get("kind")):
                    yield record


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Iterate over the complete lines of a file, up to the first that is cut off or longer than any record."""
    while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
        yield line


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


def record_in(line: bytes) -> dict[str, Any] | None:
    """Return the record in a complete line; None if there is none, or its step is no number."""
    try:
        record = parse_json(line)
        is_record = isinstance(record, dict) and isinstance(record["step"], int | float)
        return record if is_record and 0 <= float(record["step"]) < math.inf else None
    except (ValueError, KeyError, OverflowError):
        return None


# The records of a run as columns, for notebooks: lists, or a pandas DataFrame.


class History:
    """The records of a run folder: how its loss and metrics developed."""

    def __init__(self, folder: Path) -> None:
        #: Columns of the training records, by name: `step`, `epoch`, `loss`, `lr` and others. Lists of one length; None
        #: where a record lacks the value.
        self.train = _columns(read_records(folder, "train"))
        #: Columns of the evaluations: `step`, `epoch`, `loss` and the metrics.
        self.eval = _columns(read_records(folder, "eval"))

    def frame(self, kind: Literal["eval", "train"] = "eval") -> DataFrame:
        """Return the columns as a pandas DataFrame, one row per record.

        Raises:
            ConfigError: pandas is not installed.
        """
        require("notebook", "History.frame", "pandas")
        from pandas import DataFrame

        return DataFrame(self.train if kind == "train" else self.eval)

    def __repr__(self) -> str:
        sizes = (len(columns.get("step", ())) for columns in (self.eval, self.train))
        names = ", ".join(
            name for name in self.eval if name not in ("step", "epoch") and "/" not in name
        )
        return "History({} evaluations: {}; {} training records)".format(
            next(sizes), names or "none", next(sizes)
        )


def _columns(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    records = list(records)
    # A dict keeps the order of first occurrence, which a set would not.
    names = dict.fromkeys(name for record in records for name in record if name != "kind")
    return {name: [record.get(name) for record in records] for name in names}
