"""Run folders and trackers for tests of trackers."""

import json
from pathlib import Path

from samebits.report.trackers.start import TrackerProcess
from samebits.report.trackers.tracker import Outcome

CONFIG = """\
recipe: flowers
epochs: 2
optim: {lr: 0.1, betas: [0.9, 0.999]}
report: {project: garden}
"""
SHA256 = "ab" * 32

# Writes what it receives to a file of its folder.
NOTES = """
import json
import samebits

class Notes(samebits.Tracker):
    def start(self, run):
        self.file = open(run.folder / "notes.jsonl", "a", buffering=1)
        self.note("start", run.name, run.id, run.project, run.settings["optim"]["lr"], run.is_resumed)
    def note(self, *values):
        self.file.write(json.dumps(values) + "\\n")
    def log(self, step, values):
        self.note("log", step, values)
    def finish(self, outcome, result):
        self.note("finish", outcome, result.get("weights_sha256"))
"""


def make_run(folder: Path) -> Path:
    """A run folder with settings and no records."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


def write_records(run: Path, steps: range) -> None:
    """Append a training record per step, and an evaluation after the last one."""
    lines = [{"kind": "train", "step": step, "epoch": step / 10, "loss": 1 / step} for step in steps]
    lines.append({"kind": "eval", "step": steps[-1], "epoch": steps[-1] / 10, "top1": steps[-1] / 100, "odd": None})
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_result(run: Path) -> None:
    (run / "result.json").write_text(json.dumps({"weights_sha256": SHA256, "root": "cd" * 32}))


def track(run: Path, name: str, outcome: Outcome, *, is_new: bool = False) -> list[str]:
    """Let a tracker follow a run to its end; returns what is reported to the user."""
    texts: list[str] = []
    process = TrackerProcess(name, run, texts.append, is_new=is_new)
    process.end(outcome)
    process.close(is_patient=True)
    return texts


def notes(run: Path) -> list[list[object]]:
    """What the tracker `NOTES` received."""
    text = (run / "trackers" / "notes.py" / "notes.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
