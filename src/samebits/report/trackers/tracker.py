"""What an experiment tracker implements, and what a run gives it.

A tracker runs in a process of its own (`process.py`), which reads the records of the run folder. The training process
neither imports it nor waits for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is started for."""

    name: str  #: The name of the run folder.
    id: str  #: Eight hex digits, the same after each resume. A new run in the same folder has another one.
    project: str | None  #: `report.project`; None if it is not set.
    recipe: str  #: What is trained: the recipe or preset.
    settings: Mapping[str, Any]  #: All settings, nested by section as in config.yaml.
    run_folder: Path  #: The run folder.
    folder: Path  #: A folder of the tracker's own inside the run folder, for its files.
    is_resumed: bool  #: Whether this tracker has received records of this run before.


class Tracker(ABC):
    """Receives the records of a run. An exception ends the tracker, never the training.

    A file with one subclass is a tracker: `report.trackers=[my_tracker.py]`. The subclass is created without arguments.
    """

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Open the run in the tracker, or continue it if `run.is_resumed`."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive a record. Records arrive in the order of their steps, each once.

        Args:
            step: Steps completed.
            values: Values by name: "train/loss", "eval/top1", and "epoch". NaN stands for a value that is not finite.
        """

    def flush(self) -> None:  # noqa: B027 - optional
        """Store what `log` received. Called after each group of records; records before it are not sent again."""

    @abstractmethod
    def finish(self, outcome: Outcome, result: Mapping[str, Any]) -> None:
        """Close the run.

        Args:
            outcome: "done", "stopped" by a signal after it saved, or "failed".
            result: `result.json` of a complete run, with "weights_sha256"; empty otherwise.
        """
