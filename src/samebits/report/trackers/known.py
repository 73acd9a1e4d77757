"""The trackers that `report.trackers` can name, and the class behind each name."""

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from samebits.config.schema import TRACKERS
from samebits.errors import ConfigError
from samebits.plain_file import read_plain
from samebits.report.trackers.tracker import Tracker

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
