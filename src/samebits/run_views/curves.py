"""The curves of a run: its records by kind and name, thinned while they are collected.

They are read within limits: a run may be appending to `metrics.jsonl`, and the run folder may be a stranger's.
"""

import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.config.plain_file import parse_json
from samebits.report.records import FILE_NAME
from samebits.run_views.files import count, number, read_part, shorten

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

    epochs: list[float] = field(default_factory=list)  #: Epochs done, with a fraction inside an epoch.
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
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self.epochs, self.steps = self.epochs[1::2], self.steps[1::2]
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
        found = {int(match[1]): name for name in self.names("ranks") if (match := _RANK.fullmatch(name))}
        return {rank: self.get("ranks", found[rank]) for rank in sorted(found)}

    @property
    def last_step(self) -> tuple[int, float]:
        """The last step with a record, and its epoch."""
        points = [(curve.steps[-1], curve.epochs[-1]) for curve in self.by_name.values() if len(curve)]
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
