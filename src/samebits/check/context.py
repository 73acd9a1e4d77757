"""What all probes share: the recipe, and the notes about what it reads and keeps."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from samebits.check.line_watch import LineWatch
from samebits.check.sources import SourceTracer
from samebits.check.state import Cell, find_cells, user_modules
from samebits.check.undo import Undo, find_acting
from samebits.config.schema import RunConfig
from samebits.data.loader import Loader
from samebits.data.samples import Samples
from samebits.engine.build import build_parts
from samebits.engine.parts import Parts
from samebits.recipes.catalog import RecipeSpec

REPLACED, WRITTEN, UNSAVED = "replaced", "written", "unsaved"  # kinds of state, beside those of `state`


@dataclass
class Notes:
    """What the probes have found so far; complete up to the point at which the recipe raised an error.

    Attributes:
        tracer: Traces what the recipe reads.
        phase: What the recipe is doing.
        state: The state that changes: plain values of phase, kind, path, what, file, line, and whether it acts.
        acting: Path of a piece of state -> whether it alone makes a result differ; without those that are not proved.
        checks: Results by name.
        settings: Settings of the trials.
    """

    tracer: SourceTracer = field(default_factory=SourceTracer)
    phase: str = "import"
    state: list[dict[str, Any]] = field(default_factory=list)
    acting: dict[str, bool] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    settings: list[str] = field(default_factory=list)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Trace a part of the recipe."""
        self.phase = phase
        with self.tracer.during(phase):
            yield

    def add_state(self, cells: Iterable[Cell], lines: Mapping[str, tuple[str, int]]) -> None:
        """Note state that changed in the present phase."""
        for cell in cells:
            file, line = lines.get(cell.path, ("", 0))
            place = {"file": file, "line": line, "acts": self.acting.get(cell.path)}
            self.state.append({"phase": self.phase, "kind": cell.kind, "path": cell.path, "what": cell.what, **place})

    def prove(
        self, phase: str, undo: Mapping[str, Undo], advance: Callable[[], object], is_equal: Callable[[], bool]
    ) -> None:
        """Find which of the state that a call changes makes its result differ; see `undo.find_acting`.

        Args:
            advance: Makes the calls after which the result differs.
            is_equal: Computes the result again, and returns whether it is that of the first call.
        """
        found = find_acting(undo, advance, is_equal)
        self.acting |= found or {}
        if found is None:
            self.checks[f"other than state {phase}"] = True

    def watch(self, phase: str, suspects: list[Cell], roots: Mapping[str, object], call: Callable[[], object]) -> None:
        """Repeat a call to find the line at which each suspicious piece of state changes, and note it."""
        if suspects:
            now = find_cells(roots)
            with LineWatch({cell.path: now[cell.path] for cell in suspects if cell.path in now}) as watch:
                call()
            self.phase = phase
            self.add_state(suspects, watch.lines)

    def to_plain(self) -> dict[str, Any]:
        """Return the notes as plain values."""
        sources = [dataclasses.asdict(source) for source in self.tracer.found]
        return {
            "phase": self.phase,
            "sources": sources,
            "state": self.state,
            "checks": self.checks,
            "settings": self.settings,
            "files": sorted({str(module.__file__) for module in user_modules().values()}),
        }


@dataclass
class Probed:
    """The recipe that is probed.

    Attributes:
        spec: The recipe.
        config: The settings, with small sizes.
        dataset_info: What it read from its data.
        device: The device.
        notes: What was found.
    """

    spec: RecipeSpec
    config: RunConfig
    dataset_info: Mapping[str, Any]
    device: torch.device
    notes: Notes

    def build(self) -> Parts:
        """Build the recipe's parts again, as a new process would."""
        return build_parts(self.config, lambda: self.spec.build(self.config, self.dataset_info))

    def loader(self, samples: Samples) -> Loader:
        """Return a loader that reads in this process."""
        return Loader(samples, lambda: iter(()), self.device, channels_last=self.config.channels_last)

    def roots(self, **roots: object) -> dict[str, object]:
        """Return objects by name, with the user's modules among them."""
        return {**roots, **user_modules()}
