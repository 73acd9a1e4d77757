"""All that a run folder has on a run, read for a comparison or a report."""

from dataclasses import dataclass, field
from pathlib import Path

from samebits.plain_file import as_dict, as_list, shorten
from samebits.provenance.record import STATEMENT_FILE
from samebits.provenance.run_files import MAX_RECORDS, RunFiles, over_worlds
from samebits.report.chart import Curves
from samebits.run_views.summary import Event, RunSummary, read_events, summary_of
from samebits.run_views.values import count, numbers, text

_MAX_CLASSES = 200
_MAX_NAMES = 200  # of versions or digests


@dataclass
class RunHistory:
    """A run with its curves, events, environment and provenance. All texts come from files of unknown origin."""

    summary: RunSummary  #: The run in one row.
    curves: Curves  #: Its curves.
    events: list[Event] = field(default_factory=list)  #: What happened, in the order of time.
    #: Where the time went, seconds by part; empty for a run that is not complete.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Versions and hardware by name; several values are joined.
    environment: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)  #: Digests of the code, by name.
    data: dict[str, str] = field(default_factory=dict)  #: Digests of the data, by name.
    #: World size and first step of each part of the run.
    worlds: list[tuple[int, int]] = field(default_factory=list)
    command: str = ""  #: The command of the last start.
    #: Names of the settings that differ from the preset.
    changed: list[str] = field(default_factory=list)
    #: Names of the classes, if the recipe has any.
    classes: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)  #: chain and root, if the run is complete.
    num_samples: int = 0  #: Samples trained on.
    skipped: int = 0  #: Number of steps that were skipped because they were not finite.
    notes: list[str] = field(default_factory=list)  #: What could not be read.

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.summary.path.absolute().name or str(self.summary.path)

    @property
    def training_s(self) -> float | None:
        """Training time, seconds; None if no step is recorded."""
        return self.seconds.get("training", self.curves.get("train", "seconds").last)

    @property
    def speed(self) -> float | None:
        """Samples per second of training time over the whole run; the last recorded one if it is not complete."""
        training = self.seconds.get("training", 0.0)
        if training > 0 and self.num_samples:
            return self.num_samples / training
        return self.curves.get("train", "samples_per_s").last


def read_history(run: Path) -> RunHistory:
    """Read all that a run folder has on a run. What is missing or damaged is left out."""
    files = RunFiles(run, is_tolerant=True)
    found = RunHistory(summary_of(files), Curves(files.records()), events=read_events(run))
    if found.curves.num_records == MAX_RECORDS:
        found.notes.append("metrics.jsonl is too large, and only its beginning was read")
    result = files.result
    environment = files.environment
    found.seconds = {
        name: value for name, value in numbers(result.get("seconds")).items() if value >= 0
    }
    found.hashes = {
        name: text(result.get(name))[:64] for name in ("chain", "root") if text(result.get(name))
    }
    found.num_samples = count(result.get("samples"))
    found.skipped = len(as_list(result.get("skipped_steps")))
    plain = as_list(result.get("worlds") or environment.get("worlds"))
    worlds = [world for world in plain[:100] if isinstance(world, dict)]
    found.worlds = [(count(world.get("size")), count(world.get("from_step"))) for world in worlds]
    found.environment, found.code = (
        _texts(over_worlds(world.get(part) for world in worlds)) for part in ("environment", "code")
    )
    for name in ("python", "platform", "cuda", "commit"):
        if value := text(environment.get(name)):
            found.environment[name] = value
    if cores := count(environment.get("num_cores")):
        found.environment["cores"] = str(cores)
    world = as_dict(environment.get("world"))
    found.environment |= {
        name: text(world.get(name)) for name in ("backend", "device", "host") if world.get(name)
    }
    command = as_list(environment.get("command"))
    found.command = shorten(" ".join(map(text, command[:100])), 1000)
    entry = files.read_json(STATEMENT_FILE)
    for name in ("predicate", "buildDefinition", "internalParameters", "data"):
        entry = as_dict(entry.get(name))
    found.data = _texts(entry)
    found.changed = [shorten(name, 120) for name in files.changed[:1000]]
    classes = as_list(files.read_json("dataset_info.json").get("classes"))
    found.classes = [shorten(name, 80) for name in classes[:_MAX_CLASSES] if isinstance(name, str)]
    return found


def _texts(values: object) -> dict[str, str]:
    entries = list(as_dict(values).items())[:_MAX_NAMES]
    return {shorten(name, 80): text(value) for name, value in entries}
