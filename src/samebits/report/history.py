"""The records of a run as columns, for notebooks: lists, or a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samebits.errors import ConfigError
from samebits.extras import is_installed, pip_line
from samebits.report.records import read_records

if TYPE_CHECKING:
    from pandas import DataFrame


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
        if not is_installed("pandas"):
            raise ConfigError("History.frame needs pandas, which is not installed", fix=f"Run {pip_line('notebook')}.")
        from pandas import DataFrame

        return DataFrame(self.train if kind == "train" else self.eval)

    def __repr__(self) -> str:
        sizes = (len(columns.get("step", ())) for columns in (self.eval, self.train))
        names = ", ".join(name for name in self.eval if name not in ("step", "epoch") and "/" not in name)
        return "History({} evaluations: {}; {} training records)".format(next(sizes), names or "none", next(sizes))


def _columns(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    records = list(records)
    # A dict keeps the order of first occurrence, which a set would not.
    names = dict.fromkeys(name for record in records for name in record if name != "kind")
    return {name: [record.get(name) for record in records] for name in names}
