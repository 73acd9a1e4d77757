"""What all probes share: the recipe, and what it reads beside its arguments and keeps."""

import builtins
import dataclasses
import datetime
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from samebits.config.schema import RunConfig
from samebits.data.loader import Loader
from samebits.data.samples import Samples
from samebits.engine.build import build_parts
from samebits.engine.parts import Parts
from samebits.frames import is_user, user_line
from samebits.recipes.catalog import RecipeSpec
from samebits.replay.state import Cell, LineWatch, Undo, find_acting, find_cells, user_modules

# Trace what a recipe reads beside its arguments: the clock, entropy, process ids, ranks, workers, hashes.
#
# `sys.setprofile` reports each call of a Python or C function in this thread. A source explains a difference that was
# observed; on its own it is no fault, since a recipe may read the clock for a log line.


CLOCK, ENTROPY, PROCESS, RANK, WORKER, HASH, ITERATOR = (
    "clock", "entropy", "process", "rank", "worker", "hash", "iterator",
)  # fmt: skip
_CLOCKS = (
    time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns,
    time.process_time, time.localtime, time.gmtime, time.ctime,
)  # fmt: skip
_PROCESSES = (
    os.getpid,
    os.getppid,
    threading.get_ident,
    threading.get_native_id,
    socket.gethostname,
)
_BUILTINS: dict[Any, str] = {
    **dict.fromkeys(_CLOCKS, CLOCK),
    **dict.fromkeys((os.urandom, os.getrandom), ENTROPY),
    **dict.fromkeys(_PROCESSES, PROCESS),
}
# Called by many libraries without a bearing on the result, so only the user's own calls count.
_DIRECT: dict[Any, str] = {builtins.hash: HASH, builtins.id: PROCESS, builtins.next: ITERATOR}
_PYTHON = {
    torch.utils.data.get_worker_info.__code__: (WORKER, "torch.utils.data.get_worker_info()"),
    torch.distributed.is_initialized.__code__: (RANK, "torch.distributed.is_initialized()"),
    torch.seed.__code__: (ENTROPY, "torch.seed()"),
}
_RANKS = {
    getattr(torch.distributed, f"get_{name}").__code__: name for name in ("rank", "world_size")
}
_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
)


@dataclass(frozen=True)
class NoiseSource:
    """Something that a recipe read beside its arguments."""

    kind: str  #: One of the constants of this module.
    phase: str  #: What the recipe was doing: "import", "build", "sample", "forward" ...
    what: str  #: What it called: "time.time()".
    file: str  #: The user's source file.
    line: int  #: The line in it.


class SourceTracer:
    """Records the sources that a block of code reads."""

    def __init__(self) -> None:
        self.phase = ""  #: What is running now.
        self.found: dict[NoiseSource, None] = {}  #: The sources, each once.

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Trace a block of code as a phase."""
        before = self.phase
        self.phase = phase
        # A profile function sees calls of C functions such as time.time, which a trace function does not.
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.phase = before

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            kind, what = _of_builtin(frame, argument)
        elif event == "call":
            kind, what = _of_function(frame)
        else:
            return
        if kind:
            line = user_line(frame)
            if line is not None:
                self.found.setdefault(NoiseSource(kind, self.phase, what, *line))


def _of_builtin(frame: FrameType, called: Any) -> tuple[str, str]:
    try:
        kind = _BUILTINS.get(called, "")
        if not kind and called in _DIRECT and is_user(frame.f_code.co_filename):
            kind = _DIRECT[called]
    except TypeError:  # a method of an object that has no hash
        return "", ""
    owner = getattr(called, "__self__", None)
    name = getattr(called, "__name__", "")
    # By identity: an object may define its own ==.
    if (owner is datetime.datetime or owner is datetime.date) and name in (
        "now",
        "utcnow",
        "today",
    ):
        return CLOCK, f"datetime.{name}()"
    if isinstance(owner, torch.Generator) and name == "seed":
        return ENTROPY, "torch.Generator.seed()"
    module = getattr(called, "__module__", "")
    prefix = {"posix": "os.", "time": "time.", "_thread": "threading.", "_socket": "socket."}.get(
        module, ""
    )
    return kind, f"{prefix}{name}()"


def _of_function(frame: FrameType) -> tuple[str, str]:
    code = frame.f_code
    if code in _PYTHON:
        return _PYTHON[code]
    if code in _RANKS:
        return RANK, f"torch.distributed.get_{_RANKS[code]}()"
    if code is os.environ.__getitem__.__func__.__code__:  # type: ignore[attr-defined]  # it is a Python method
        name = str(frame.f_locals.get("key"))
        return (RANK, f"os.environ[{name!r}]") if name in _VARIABLES else ("", "")
    if code is random.Random.seed.__code__ and frame.f_locals.get("a") is None:
        return ENTROPY, "random.Random() without a seed"
    return "", ""


# What all probes share: the recipe, and the notes about what it reads and keeps.


# kinds of state, beside those of `state`
REPLACED = "replaced"
WRITTEN = "written"
UNSAVED = "unsaved"


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
            self.state.append(
                {
                    "phase": self.phase,
                    "kind": cell.kind,
                    "path": cell.path,
                    "what": cell.what,
                    **place,
                }
            )

    def prove(
        self,
        phase: str,
        undo: Mapping[str, Undo],
        advance: Callable[[], object],
        is_equal: Callable[[], bool],
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

    def watch(
        self,
        phase: str,
        suspects: list[Cell],
        roots: Mapping[str, object],
        call: Callable[[], object],
    ) -> None:
        """Repeat a call to find the line at which each suspicious piece of state changes, and note it."""
        if suspects:
            now = find_cells(roots)
            with LineWatch(
                {cell.path: now[cell.path] for cell in suspects if cell.path in now}
            ) as watch:
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
        return Loader(
            samples, lambda: iter(()), self.device, channels_last=self.config.channels_last
        )

    def roots(self, **roots: object) -> dict[str, object]:
        """Return objects by name, with the user's modules among them."""
        return {**roots, **user_modules()}
