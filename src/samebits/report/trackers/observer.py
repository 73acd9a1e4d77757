"""Functions of a file of the user's, called with the record after a step, an evaluation or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samebits.report.records import CHECKPOINT
from samebits.report.trackers.tracker import Outcome, TrackedRun, Tracker

# Name of a function -> the kind of the records that it is called with.
KINDS = {"after_step": "train", "after_evaluation": "eval", "after_checkpoint": CHECKPOINT}
Function = Callable[[dict[str, Any]], object]


class Observer(Tracker):
    """Calls each function with a dict of its own: the record in `metrics.jsonl`, and the run folder as "run".

    Args:
        functions: The functions of the file by name, those in `KINDS`.
    """

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = {KINDS[name]: function for name, function in functions.items()}
        self._run = Path()

    def start(self, run: TrackedRun) -> None:
        """Note the run."""
        self._run = run.run_folder

    def receive(self, record: Mapping[str, Any]) -> None:
        """Call the function for this kind of record, if the file has one."""
        function = self._functions.get(str(record.get("kind")))
        if function is None:
            return
        function({**record, "run": str(self._run)})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing: `receive` has the whole record."""

    def finish(self, outcome: Outcome, result: Mapping[str, Any]) -> None:
        """Do nothing."""
