"""What an experiment tracker implements, and what a run gives it.

A tracker runs in a process of its own (`process.py`), which reads the records of the run folder. The training process
neither imports it nor waits for it.
"""

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from samebits.config.schema import TRACKERS
from samebits.errors import ConfigError
from samebits.plain_file import read_plain

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


# The trackers that `report.trackers` can name, and the class behind each name.


MAX_FILE_BYTES = 16 * 1024 * 1024
# Name -> the packages that it imports. TensorBoard's files are written with the records (`report/records.py`).
_PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy")}


def external(names: Iterable[str]) -> list[str]:
    """Return the trackers that run in processes of their own: all but TensorBoard."""
    return [name for name in names if name != "tensorboard"]


def label(name: str) -> str:
    """Return a tracker's name in messages and paths: the name of its file without the folder."""
    return name if name in TRACKERS else Path(name).name


def check_trackers(names: Iterable[str]) -> None:
    """Check that trackers can be imported: their packages are installed, and their files exist."""
    for name in external(names):
        missing = [
            package
            for package in _PACKAGES.get(name, ())
            if importlib.util.find_spec(package) is None
        ]
        if missing:
            raise ConfigError(
                f"report.trackers has {name}, which needs the package {missing[0]}",
                fix=f"pip install 'samebits[{name}]'",
            )
        if name not in _PACKAGES and not Path(name).expanduser().is_file():
            raise ConfigError(
                f"report.trackers has {name}, and there is no such file",
                allowed=f"{', '.join(TRACKERS)}, or a Python file with a subclass of samebits.Tracker",
                fix="Check the path.",
            )


def make_tracker(name: str) -> Tracker:
    """Create a tracker by its name or file.

    Raises:
        ConfigError: The file has not exactly one tracker.
        ImportError: A package is missing.
    """
    if name in _PACKAGES:
        module = importlib.import_module(f"samebits.report.trackers.to_{name}")
    else:
        module = _load(Path(name).expanduser())
    classes = [
        each
        for each in vars(module).values()
        # By module, since a file also has the classes that it imports, `Tracker` among them.
        if isinstance(each, type)
        and issubclass(each, Tracker)
        and each.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise ConfigError(
            f"{name} has {len(classes) or 'no'} subclass{'es' if len(classes) > 1 else ''} of samebits.Tracker",
            allowed="one subclass of samebits.Tracker",
            fix="Write one subclass in the file.",
        )
    return classes[0]()


def _load(path: Path) -> ModuleType:
    """Execute the source of a tracker file, which the command has checked; never a `.pyc` file next to it."""
    module = ModuleType(f"samebits_tracker_{path.stem}")
    module.__file__ = str(path)
    # `dont_inherit`: this file's future imports must not change how the user's file is compiled.
    exec(
        compile(read_plain(path, MAX_FILE_BYTES), str(path), "exec", dont_inherit=True),
        module.__dict__,
    )
    return module
