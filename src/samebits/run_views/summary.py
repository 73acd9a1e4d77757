"""A run in one row: recipe, state, step, metrics, time, settings and hash, from the small files of its folder."""

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from samebits.config import document
from samebits.config.given import flat
from samebits.config.plain_file import parse_json
from samebits.errors import SamebitsError
from samebits.report.records import FILE_NAME as RECORDS
from samebits.run_views.events import first_time
from samebits.run_views.files import count, number, numbers, read_object, read_part, shorten, text
from samebits.run_views.state import State, state_of

_TAIL_BYTES = (32 * 1024, 1024 * 1024)  # of metrics.jsonl: the second size if the first has no evaluation
_MAX_SETTINGS = 1000
_NO_METRICS = ("step", "epoch")
# Files whose change makes a summary outdated.
FILES = (
    "config.yaml",
    "environment.json",
    "result.json",
    RECORDS,
    "run.lock",
    "logs/rank-0.log",
    "logs/launcher.log",
    "checkpoints/best.json",
)


@dataclass
class RunSummary:
    """A run in one row. Texts and numbers come from files of unknown origin."""

    path: Path  #: The run folder.
    recipe: str = ""  #: Name of the recipe or preset.
    state: State = "stopped"  #: running, stopped, failed or done.
    reason: str = ""  #: Why it failed, one line.
    step: int = 0  #: Steps done.
    num_steps: int = 0  #: Steps of the whole run; 0 if unknown.
    epoch: float = 0.0  #: Epochs done.
    metrics: dict[str, float] = field(default_factory=dict)  #: Metrics of the last evaluation, by name.
    monitor: str = ""  #: Name of the metric by which the best evaluation is chosen; empty if unknown.
    best: float | None = None  #: Its best value.
    train_loss: float | None = None  #: Loss of the last recorded step.
    started: float | None = None  #: Unix time of the start, seconds.
    #: Wall-clock time of the command that completed the run, or its whole training time if that is longer; training
    #: time of a run that is not complete.
    took_s: float | None = None
    procs: int = 0  #: World size, as of the last start.
    weights_sha256: str = ""  #: Hash of the final weights; empty if the run is not complete.
    settings: dict[str, Any] = field(default_factory=dict)  #: Settings by dotted name.

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name or str(self.path)

    def to_plain(self) -> dict[str, Any]:
        """Return the summary as plain JSON."""
        return {"run": self.name, **vars(self), "path": str(self.path)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "RunSummary":
        """Read the result of `to_plain`. Raises ValueError if it has another form."""
        values: dict[str, Any] = {each.name: plain.get(each.name) for each in fields(cls)}
        if not (isinstance(values["path"], str) and values["state"] in get_args(State)):
            raise ValueError("not a summary")
        if not all(isinstance(values[name], dict) for name in ("metrics", "settings")):
            raise ValueError("not a summary")
        return cls(**{**values, "path": Path(values["path"])})


def read_summary(run: Path) -> RunSummary:
    """Read a run in one row. What is missing or damaged is left out."""
    found = RunSummary(run, settings=read_settings(run))
    result, environment = read_object(run / "result.json"), read_object(run / "environment.json", 1024 * 1024)
    recipe = Path(str(found.settings.get("recipe", ""))).name
    found.recipe = text(environment.get("name")) or text(result.get("name")) or recipe
    # config.yaml is written once. In a copied folder, its time is that of the copy.
    times = [first_time(run)]
    with suppress(OSError):
        times.append(os.stat(run / "config.yaml").st_mtime)
    found.started = min((each for each in times if each), default=None)
    world = environment.get("world")
    found.procs = count(world.get("size")) if isinstance(world, dict) else 0
    _add_best(found, read_object(run / "checkpoints" / "best.json", 1 << 16))
    if result:
        found.step = found.num_steps = count(result.get("steps"))
        found.metrics = numbers(result.get("metrics"))
        _add_best(found, result.get("best"))
        seconds = numbers(result.get("seconds"))
        found.took_s = max((seconds[name] for name in ("all", "training") if name in seconds), default=None)
        found.weights_sha256 = text(result.get("weights_sha256"))[:64]
    _add_records(found, is_complete=bool(result))
    found.monitor = found.monitor or next((name for name in found.metrics if name != "loss"), "")
    found.state, found.reason = state_of(run, is_complete=bool(result))
    return found


def read_settings(run: Path) -> dict[str, Any]:
    """Return the settings in `config.yaml` by dotted name; empty if the file is missing or damaged."""
    path = run / "config.yaml"
    with suppress(SamebitsError, RecursionError):
        settings = flat(document.read(path, str(path)).values)
        return {shorten(name, 120): _plain(value) for name, value in list(settings.items())[:_MAX_SETTINGS]}
    return {}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        converted = number(value)
        return str(value)[:80] if converted is None else value
    return shorten(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))


def _add_best(found: RunSummary, best: object) -> None:
    if isinstance(best, dict) and text(best.get("metric")):
        found.monitor, found.best = shorten(best["metric"], 80), number(best.get("value"))


def _add_records(found: RunSummary, *, is_complete: bool) -> None:
    """Add step, epoch, loss and time from the last records, and metrics that the result does not have."""
    for num_bytes in _TAIL_BYTES:
        train, evaluation = _last_records(found.path / RECORDS, num_bytes)
        if train and evaluation:
            break
    last = max(evaluation, train, key=lambda record: count(record.get("step")))
    step, found.epoch = count(last.get("step")), number(last.get("epoch")) or 0.0
    found.train_loss = number(train.get("loss"))
    found.took_s = number(train.get("seconds")) if found.took_s is None else found.took_s
    found.metrics = found.metrics or {
        name: value for name, value in numbers(evaluation).items() if name not in _NO_METRICS
    }
    if not is_complete:
        epochs, limit = number(found.settings.get("epochs")) or 0.0, count(found.settings.get("max_steps"))
        found.step = step
        rate = step / found.epoch if found.epoch > 0 else math.inf
        found.num_steps = count(round(rate * epochs)) if rate < 1e15 else limit
        found.num_steps = min(found.num_steps, limit) if limit else found.num_steps
    elif not last:
        found.epoch = number(found.settings.get("epochs")) or 0.0


def _last_records(path: Path, num_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last record of a step and of an evaluation within the end of a file; empty if there is none."""
    last: dict[str, dict[str, Any]] = {"train": {}, "eval": {}}
    # The last line may be half written, and the first one is cut off.
    for line in reversed(read_part(path, num_bytes, is_end=True).split(b"\n")[:-1]):
        with suppress(ValueError):
            record = parse_json(line)
            kind = record.get("kind") if isinstance(record, dict) else None
            if kind in last and not last[kind]:
                last[kind] = record
        if all(last.values()):
            break
    return last["train"], last["eval"]
