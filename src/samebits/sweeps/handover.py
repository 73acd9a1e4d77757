"""Start a run from the state of another one whose steps so far are the same.

The run folder gets all that a run with these settings would have after the same steps: the checkpoints, with its own
settings in their state, the record of steps, the metrics, and the dataset info. So it is resumed, verified and compared
like any other run. `shared.json` records where its first steps were trained. Large files are hard links: Samebits
replaces files of a run and never changes them in place.

`config.yaml` is written last. A folder without it was not completed, and is filled again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.config.document import to_yaml
from samebits.config.load import Loaded
from samebits.config.plain_file import read_plain
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError
from samebits.metrics.early_stop import Patience, last_step, metric_of
from samebits.provenance.run_identity import SETTINGS
from samebits.provenance.same_run import plain_settings
from samebits.provenance.shared_steps import FILE_NAME as SHARED
from samebits.provenance.step_log import FILE_NAME as STEPS
from samebits.provenance.step_log import StepLog, read_steps, write_steps
from samebits.report.records import FILE_NAME as METRICS
from samebits.report.records import read_records
from samebits.scratch import partial_path
from samebits.storage.checkpoint import name_of, steps
from samebits.storage.manifest import FORMAT, MANIFEST, OPTIMIZER, STATE, WEIGHTS, manifest_of, read_state, sha256_of
from samebits.storage.run_folder import RunFolder, write_atomically
from samebits.sweeps.prefixes import learning_rates

_MAX_BYTES = 1 << 30  # of metrics.jsonl
_COPIED = ("dataset_info.json", "recipe.py", "recipe.json", "pictures/train_samples.png")


@dataclass(frozen=True)
class _Schedule:
    """When a run ends, and what its steps train with.

    Attributes:
        config: Its settings.
        rates: The learning rate of each step.
        evaluations: Step and metrics of each evaluation of the donor, in order.
        monitor: The metric that the recipe monitors, and whether its "max" or "min" is best.
    """

    config: RunConfig
    rates: list[float]
    evaluations: Sequence[tuple[int, Mapping[str, float | None]]]
    monitor: tuple[str, str]

    def last_step(self) -> int:
        """Return the step at which these evaluations end the run; that of its last learning rate if they do not."""
        early = last_step(self.evaluations, self.config.stop_early, self.monitor)
        return len(self.rates) if early is None else early

    def early_state(self, evaluated_step: int) -> dict[str, Any]:
        """Return what the run remembers for `stop_early` after the evaluation of a step."""
        rule, patience = self.config.stop_early, Patience()
        if rule.patience is None:
            return {"stop_best": None, "num_stale": 0, "has_stopped_early": False}
        name, sign = metric_of(rule, self.monitor)
        for step, metrics in self.evaluations:
            if step <= evaluated_step:
                value = metrics.get(name)
                patience = patience.after(math.nan if value is None else value, sign, rule)
        is_over = patience.is_over(rule) and evaluated_step < len(self.rates)
        return {"stop_best": patience.best, "num_stale": patience.num_stale, "has_stopped_early": is_over}


def hand_over(
    donor: Path, target: Path, loaded: Loaded[RunConfig], steps_per_epoch: int, monitor: tuple[str, str]
) -> int | None:
    """Fill the folder of a new run with the state of another run.

    Args:
        donor: The folder of the other run, which is not running.
        target: The folder of the new run.
        loaded: The settings of the new run.
        steps_per_epoch: Steps of one epoch.
        monitor: The metric that the recipe monitors, and whether its "max" or "min" is best.

    Returns:
        The step from which the new run continues; None if no checkpoint of the other run can be used.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    config, present = loaded.config, steps(donor / "checkpoints")
    try:
        log = read_steps(donor / STEPS)
    except CheckpointError:
        return None  # without a record, nothing shows that the steps are equal
    evaluations = [(each["step"], each) for each in read_records(donor, "eval")]
    schedule = _Schedule(config, learning_rates(config, steps_per_epoch).tolist(), evaluations, monitor)
    usable = [step for step in present if step <= schedule.last_step()]
    for step in reversed(usable):
        if _is_usable(donor, step, log, schedule.rates, usable):
            _fill(donor, target, loaded, [each for each in usable if each <= step], schedule)
            write_steps(target / STEPS, log.head(step))
            _note(donor, target, step)
            # Last, see above.
            write_atomically(target / "config.yaml", to_yaml(plain_settings(config)).encode())
            return step
    return None


def _is_usable(donor: Path, step: int, log: StepLog, rates: list[float], present: list[int]) -> bool:
    """Return whether a run with these learning rates would have the same checkpoint."""
    try:
        state = read_state(donor / "checkpoints" / name_of(step))["state"]
        best = state.get("best")
        has_best = best is None or (best["step"] in present and best["step"] <= step)
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return False
    head = log.head(step)
    if not (has_best and head.is_whole and head.stop == step and head.link().hex() == state.get("chain")):
        return False
    # The rates that were trained with, not those that the settings promise.
    return [record.lr for record in map(head.get, range(step)) if record is not None] == rates[:step]


def _fill(donor: Path, target: Path, loaded: Loaded[RunConfig], copied: list[int], schedule: _Schedule) -> None:
    (target / "checkpoints").mkdir(parents=True, exist_ok=True)
    for step in copied:
        _copy_checkpoint(donor, target, step, schedule)
    for name in _COPIED:
        if (donor / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            write_atomically(target / name, read_plain(donor / name))
    # Records of later steps are removed when the run starts.
    if (donor / METRICS).exists():
        write_atomically(target / METRICS, read_plain(donor / METRICS, _MAX_BYTES))
    write_atomically(target / "config.diff.yaml", to_yaml(loaded.diff).encode())


def _copy_checkpoint(donor: Path, target: Path, step: int, schedule: _Schedule) -> None:
    """Copy a checkpoint with the new settings in its state, under its final name once it is complete."""
    source, final = (folder / "checkpoints" / name_of(step) for folder in (donor, target))
    try:
        files, plain = manifest_of(source), read_state(source)
    except CheckpointError:
        return  # it is damaged, and a run would not start from it
    plain["run"] = {**plain.get("run", {}), SETTINGS: plain_settings(schedule.config)}
    plain["state"] = {**plain["state"], **schedule.early_state(plain["state"]["evaluated_step"])}
    content = json.dumps(plain, indent=1).encode()
    files[STATE] = {"bytes": len(content), "sha256": sha256_of(content)}
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    partial.mkdir(exist_ok=True)
    for name in (WEIGHTS, OPTIMIZER):
        _link(source / name, partial / name)
    write_atomically(partial / STATE, content)
    write_atomically(partial / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1).encode())
    if not final.exists():  # from a copy that was killed
        partial.rename(final)


def _link(source: Path, target: Path) -> None:
    with suppress(OSError):
        target.unlink(missing_ok=True)
        os.link(source, target)
        return
    part = partial_path(target)
    shutil.copyfile(source, part)
    part.replace(target)


def _note(donor: Path, target: Path, step: int) -> None:
    manifest = manifest_of(donor / "checkpoints" / name_of(step))
    content = {
        "steps": step,
        "checkpoint": f"{donor.name}/checkpoints/{name_of(step)}",
        "sha256": {name: manifest[name].get("sha256") for name in (WEIGHTS, OPTIMIZER)},
    }
    RunFolder(target).write_json(SHARED, content)


def is_at(run: Path, step: int, config: RunConfig, steps_per_epoch: int) -> bool:
    """Return whether a run has a checkpoint of a step, written after the evaluation that follows the step.

    Args:
        run: The run folder.
        step: The step.
        config: Its settings.
        steps_per_epoch: Steps of one epoch.
    """
    try:
        state = read_state(run / "checkpoints" / name_of(step))["state"]
    except (CheckpointError, KeyError):
        return False
    is_due = config.eval_interval.is_due(step, steps_per_epoch, 0.0)
    return state.get("evaluated_step") == step or not is_due
