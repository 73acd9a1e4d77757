"""All that a run folder has on a run, read for a comparison or a report."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.config import document
from samebits.config.given import flat
from samebits.errors import SamebitsError
from samebits.plain_file import parse_json
from samebits.provenance.run_files import over_worlds
from samebits.report.records import FILE_NAME
from samebits.run_views.files import count, number, numbers, read_object, read_part, shorten, text
from samebits.run_views.summary import Event, RunSummary, read_events, read_summary

# The curves of a run: its records by kind and name, thinned while they are collected.
#
# They are read within limits: a run may be appending to `metrics.jsonl`, and the run folder may be a stranger's.


MAX_POINTS = 1000  # of a curve: more than a screen has columns
_MAX_CURVES = 200
_NO_VALUES = ("kind", "step", "epoch")
KINDS = ("train", "eval", "ranks")
_RANK = re.compile(r"rank_(\d{1,4})_ms")
_MAX_FILE_BYTES = 256 * 1024 * 1024
_MAX_RECORDS = 500_000  # of a file: about 500 MB of memory and 10 s
_MAX_LINE_BYTES = 256 * 1024
_MAX_LINE_MEMORY_BYTES = 4 * 1024 * 1024


@dataclass
class Curve:
    """Values of one name over the epochs of a run.

    Neighbors are averaged once there are too many, so that a run of any length takes little memory.
    """

    #: Epochs done, with a fraction inside an epoch.
    epochs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  #: Steps done.
    values: list[float] = field(default_factory=list)  #: The values.
    _every: int = 1
    _pending: list[float] = field(default_factory=list)
    last: float | None = None

    def add(self, step: int, epoch: float, value: float) -> None:
        """Append a value."""
        self.last = value
        self._pending.append(value)
        if len(self._pending) < self._every:
            return
        self.epochs.append(epoch)
        self.steps.append(step)
        self.values.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self.values) >= 2 * MAX_POINTS:
            # In pairs: the mean of both, at the later one's position.
            self.values = [
                (a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)
            ]
            self.epochs = self.epochs[1::2]
            self.steps = self.steps[1::2]
            self._every *= 2

    def __len__(self) -> int:
        return len(self.values)


class Curves:
    """All curves of a run, from its records."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        #: (kind of the record, name of the value) -> curve.
        self.by_name: dict[tuple[str, str], Curve] = {}
        for record in records:
            if record["kind"] not in KINDS:
                continue
            for name, value in record.items():
                if name in _NO_VALUES or (converted := number(value)) is None:
                    continue
                key = (record["kind"], shorten(name, 80))
                curve = self.by_name.get(key)
                if curve is None:
                    if len(self.by_name) >= _MAX_CURVES:
                        continue
                    curve = self.by_name[key] = Curve()
                curve.add(record["step"], record["epoch"], converted)

    def get(self, kind: str, name: str) -> Curve:
        """Return a curve; an empty one if there is none."""
        return self.by_name.get((kind, name), Curve())

    def names(self, kind: str) -> list[str]:
        """Return the names of the values of a kind of records, in the order of the records."""
        return [name for each, name in self.by_name if each == kind]

    def ranks(self) -> dict[int, Curve]:
        """Return the step time of each rank in milliseconds, by rank."""
        found = {
            int(match[1]): name for name in self.names("ranks") if (match := _RANK.fullmatch(name))
        }
        return {rank: self.get("ranks", found[rank]) for rank in sorted(found)}

    @property
    def last_step(self) -> tuple[int, float]:
        """The last step with a record, and its epoch."""
        points = [
            (curve.steps[-1], curve.epochs[-1]) for curve in self.by_name.values() if len(curve)
        ]
        return max(points, default=(0, 0.0))


def read_curve_records(run: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the records of a run that have kind, step and epoch, and whether the file has more than are read."""
    content = read_part(run / FILE_NAME, _MAX_FILE_BYTES + 1, is_end=False)
    records: list[dict[str, Any]] = []
    for index, line in enumerate(io.BytesIO(content)):
        if index == _MAX_RECORDS:
            return records, True
        # A line counts once it ends with a line feed: the last one may be half-written.
        if not line.endswith(b"\n") or len(line) > _MAX_LINE_BYTES:
            continue
        try:
            record = parse_json(line, _MAX_LINE_MEMORY_BYTES)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            epoch = number(record.get("epoch"))
            if epoch is not None and epoch >= 0:
                records.append({**record, "step": count(record.get("step")), "epoch": epoch})
    return records, len(content) > _MAX_FILE_BYTES


_MAX_CLASSES = 200
_MAX_CSV_BYTES = 1024 * 1024
_MAX_NAMES = 200  # of versions or digests
_MAX_INFO_BYTES = 64 * 1024 * 1024  # it may list each file of the dataset


@dataclass
class Confusion:
    """A confusion matrix."""

    labels: list[str]  #: Names of the classes.
    counts: list[list[int]]  #: Number of samples as `counts[ground truth][prediction]`.


@dataclass
class RunHistory:
    """A run with its curves, events, environment and provenance. All texts come from files of unknown origin."""

    summary: RunSummary  #: The run in one row.
    curves: Curves  #: Its curves.
    events: list[Event] = field(default_factory=list)  #: What happened, in the order of time.
    #: Where the time went, seconds by part; empty for a run that is not complete.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Versions and hardware by name; several values are joined.
    environment: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)  #: Digests of the code, by name.
    data: dict[str, str] = field(default_factory=dict)  #: Digests of the data, by name.
    #: World size and first step of each part of the run.
    worlds: list[tuple[int, int]] = field(default_factory=list)
    command: str = ""  #: The command of the last start.
    #: Names of the settings that differ from the preset.
    changed: list[str] = field(default_factory=list)
    #: Names of the classes, if the recipe has any.
    classes: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)  #: chain and root, if the run is complete.
    num_samples: int = 0  #: Samples trained on.
    skipped: int = 0  #: Number of steps that were skipped because they were not finite.
    notes: list[str] = field(default_factory=list)  #: What could not be read.

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.summary.path.absolute().name or str(self.summary.path)

    @property
    def training_s(self) -> float | None:
        """Training time, seconds; None if no step is recorded."""
        return self.seconds.get("training", self.curves.get("train", "seconds").last)

    @property
    def speed(self) -> float | None:
        """Samples per second of training time over the whole run; the last recorded one if it is not complete."""
        training = self.seconds.get("training", 0.0)
        if training > 0 and self.num_samples:
            return self.num_samples / training
        return self.curves.get("train", "samples_per_s").last


def read_history(run: Path) -> RunHistory:
    """Read all that a run folder has on a run. What is missing or damaged is left out."""
    records, is_cut = read_curve_records(run)
    found = RunHistory(read_summary(run), Curves(records), events=read_events(run))
    if is_cut:
        found.notes.append("metrics.jsonl is too large, and only its beginning was read")
    result = read_object(run / "result.json")
    environment = read_object(run / "environment.json")
    found.seconds = {
        name: value for name, value in numbers(result.get("seconds")).items() if value >= 0
    }
    found.hashes = {
        name: text(result.get(name))[:64] for name in ("chain", "root") if text(result.get(name))
    }
    found.num_samples = count(result.get("samples"))
    skipped = result.get("skipped_steps")
    found.skipped = len(skipped) if isinstance(skipped, list) else 0
    plain = result.get("worlds") or environment.get("worlds")
    worlds = (
        [world for world in plain[:100] if isinstance(world, dict)]
        if isinstance(plain, list)
        else []
    )
    found.worlds = [(count(world.get("size")), count(world.get("from_step"))) for world in worlds]
    found.environment, found.code = (
        _texts(over_worlds(world.get(part) for world in worlds)) for part in ("environment", "code")
    )
    for name in ("python", "platform", "cuda", "commit"):
        if value := text(environment.get(name)):
            found.environment[name] = value
    if cores := count(environment.get("num_cores")):
        found.environment["cores"] = str(cores)
    world = environment.get("world")
    if isinstance(world, dict):
        found.environment |= {
            name: text(world.get(name)) for name in ("backend", "device", "host") if world.get(name)
        }
    command = environment.get("command")
    if isinstance(command, list):
        found.command = shorten(" ".join(text(part) for part in command[:100]), 1000)
    entry: Any = read_object(run / "provenance.json")
    for name in ("predicate", "buildDefinition", "internalParameters", "data"):
        entry = entry.get(name) if isinstance(entry, dict) else None
    found.data = _texts(entry)
    path = run / "config.diff.yaml"
    with suppress(SamebitsError, RecursionError):
        found.changed = [
            shorten(name, 120) for name in flat(document.read(path, str(path)).values)
        ][:1000]
    classes = read_object(run / "dataset_info.json", _MAX_INFO_BYTES).get("classes")
    if isinstance(classes, list):
        found.classes = [
            shorten(name, 80) for name in classes[:_MAX_CLASSES] if isinstance(name, str)
        ]
    return found


def read_confusion(run: Path) -> Confusion | None:
    """Return the confusion matrix of the last evaluation, from `pictures/confusion.csv`; None if there is none."""
    content = read_part(run / "pictures" / "confusion.csv", _MAX_CSV_BYTES, is_end=False)
    try:
        rows = list(csv.reader(io.StringIO(content.decode("utf-8", "replace"))))[: _MAX_CLASSES + 1]
    except csv.Error:
        return None
    if (
        len(rows) < 3 or len(rows[0]) != len(rows) + 2
    ):  # ground truth, samples, correct, and a column for each class
        return None
    labels = [shorten(row[0], 80) for row in rows[1:] if len(row) == len(rows[0])]
    counts = [
        [count(_whole(cell)) for cell in row[3:]] for row in rows[1:] if len(row) == len(rows[0])
    ]
    return (
        Confusion(labels, counts)
        if labels and all(len(row) == len(labels) for row in counts)
        else None
    )


def _whole(cell: str) -> float | None:
    try:
        return number(float(cell)) if len(cell) < 20 else None
    except ValueError:
        return None


def _texts(values: object) -> dict[str, str]:
    entries = list(values.items())[:_MAX_NAMES] if isinstance(values, dict) else []
    return {shorten(name, 80): text(value) for name, value in entries}
