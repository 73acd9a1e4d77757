"""Runs for the trials of `samebits diff`: trained and compared within this process."""

import contextlib
import io
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from samebits.cluster.env import ALONE
from samebits.data.division import Alone
from samebits.data.order import Order
from samebits.engine import loop
from samebits.engine.opening import opened
from samebits.engine.output.reports import Reports
from samebits.engine.run_spec import RunSpec
from samebits.engine.step import run_step
from samebits.launch.start import join_world
from samebits.recipes.catalog import find
from samebits.recipes.trust import trust
from samebits.replay.diff import RunDifference, diff_runs
from tests.diff_trials import recipe as recipe_module
from tests.verify_trials.runs import Cheat, Killed, killed_before

RECIPE = Path(recipe_module.__file__)
NUM_STEPS = 40  # of 2 epochs, with a checkpoint every 10 steps
Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Fault:
    """A planted difference between two runs.

    Attributes:
        kind: What is different.
        name: Kind and parameters.
        step: The step that has to be found; None: no step differs.
        place: A part of the module that has to be found; empty if it cannot be known from the run folders.
        settings: Settings of the second run.
        base: Settings of both runs.
        code: (old, new) parts of the recipe's source, for the second run.
        data: Changes the data of the second run.
        cheat: Trains the second run in place of `run_step`.
        stop: Step before which the second run is killed, changed by `edit`, and resumed; None: it is not.
        edit: Changes the folder of the second run.
    """

    kind: str
    name: str
    step: int | None
    place: str = ""
    settings: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    code: tuple[tuple[str, str], ...] = ()
    data: Callable[[Arrays], None] | None = None
    cheat: Cheat = run_step
    stop: int | None = None
    edit: Callable[[Path], None] | None = None


@dataclass
class Trials:
    """Runs in a scratch folder.

    Attributes:
        folder: The scratch folder. XDG_CONFIG_HOME should be in a temporary folder too: recipes are trusted.
        first: Folder of the first run, by settings.
    """

    folder: Path
    first: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Write the recipe and the data of the first run."""
        self._write_recipe("first", ())
        self._write_data("first", None)

    def compare(self, fault: Fault, number: int) -> RunDifference:
        """Train two runs with a planted difference, and compare them."""
        if fault.base not in self.first:
            folder = self.folder / f"a{len(self.first)}"
            self.train(folder, "first", "first", fault.base)
            self.first[fault.base] = folder
        name, folder = f"second{number}", self.folder / f"b{number}"
        source = self._write_recipe(name, fault.code) if fault.code else "first"
        data = self._write_data(name, fault.data) if fault.data is not None else "first"
        settings = (*fault.base, *fault.settings)
        if fault.stop is not None:
            self.train(folder, source, data, settings, killed_before(fault.stop))
        elif fault.cheat is not run_step or fault.settings or fault.code or fault.data is not None:
            self.train(folder, source, data, settings, fault.cheat)
        else:
            shutil.copytree(self.first[fault.base], folder)
        if fault.edit is not None:
            fault.edit(folder)
        if fault.stop is not None:
            self.train(folder, source, data, settings, resume="auto")
        found = diff_runs(self.first[fault.base], folder)
        shutil.rmtree(folder)
        return found

    def train(
        self, folder: Path, source: str, data: str, settings: Sequence[str] = (), cheat: Cheat = run_step,
        resume: str = "never",
    ) -> None:  # fmt: skip
        """Train a run in this process."""
        found = find(str(self.folder / source / "recipe.py"))
        root = f"data.root={self.folder / data}"
        config = found.load([root, *settings]).config
        spec = RunSpec("trial", config, {}, folder, resume, False, time.time())
        with (
            join_world(ALONE, config) as world,
            patch.object(loop, "run_step", cheat),
            patch.object(Reports, "_draw", lambda *_: None),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(Killed),
            opened(spec, found, world) as run,
        ):
            loop.train(run)

    def _write_recipe(self, name: str, code: Sequence[tuple[str, str]]) -> str:
        text = RECIPE.read_text(encoding="utf-8")
        for old, new in code:
            assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the recipe"
            text = text.replace(old, new)
        path = self.folder / name / "recipe.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        trust(path)
        return name

    def _write_data(self, name: str, change: Callable[[Arrays], None] | None) -> str:
        generator = np.random.default_rng(5)
        labels = generator.integers(0, 3, 240)
        pictures = generator.normal(size=(240, 1, 6, 6)).astype(np.float32) + labels[:, None, None, None].astype(
            np.float32
        )
        arrays: Arrays = {"pictures": pictures, "labels": labels}
        if change is not None:
            change(arrays)
        (self.folder / name).mkdir(exist_ok=True)
        np.savez(self.folder / name / "pictures.npz", **arrays)  # type: ignore[arg-type]  # names -> arrays
        return name


def first_step_of(*samples: int) -> int:
    """Return the first step that trains on one of some samples, with the settings of the recipe."""
    return next(step for step, indices in enumerate(_samples(240)) if set(samples) & set(indices))


def first_other_order(num_samples: int) -> int:
    """Return the first step whose samples differ if the dataset has another size."""
    pairs = zip(_samples(240), _samples(num_samples), strict=False)
    return next(step for step, (one, other) in enumerate(pairs) if one != other)


def _samples(num_samples: int) -> Iterator[list[int]]:
    for step in Order(num_samples, 12, 4, 0).steps(Alone(), stop=NUM_STEPS):
        yield [index for each in step.micro_batches for index in each.indices.tolist()]
