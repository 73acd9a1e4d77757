"""Whether two things belong to one run: what must match, where it is compared, and the error if it does not.

    settings     of a run folder, a checkpoint or a replay, with the present ones    differing
    ranks        code, settings, data and model of each rank, with rank 0's          check_ranks_agree
    a resume     code, data, versions and processor, with the checkpoint's           check_unchanged
    a stranger   weights, best validation and settings, with the statement           check_stated, altered_settings

`config.yaml` and `dataset_info.json` in a run folder can be altered, damaged or lost. A checkpoint has a manifest of
its own, so its copy of them, the run's `identity`, is trustworthy. What is written is in `record.py`. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from samebits.config.given import flat
from samebits.config.load import names_of, without_removed
from samebits.config.schema import Mark, RunConfig, marks_of
from samebits.errors import CheckpointError, ConfigError, DataError, LaunchError, SamebitsError
from samebits.provenance.record import BEST_FILE, STATEMENT_FILE, Evaluation
from samebits.provenance.run_files import RunFiles, settings_of
from samebits.report.format import counted
from samebits.storage.manifest import WEIGHTS, manifest_of
from samebits.storage.run_folder import RunFolder, check_utf8, holds_a_run
from samebits.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from samebits.cluster.world import World
    from samebits.provenance.fingerprint import Fingerprint


SETTINGS = "settings"
DATASET_INFO = "dataset_info_sha256"
_SAME = "Give the same settings to resume it, or another --run-dir for a new run."


def identity(config: RunConfig, dataset_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and the SHA-256 of the content of `dataset_info.json`, as plain JSON, for checkpoints."""
    return {SETTINGS: plain_settings(config), DATASET_INFO: _sha256(dataset_info)}


def _sha256(dataset_info: Mapping[str, Any]) -> str:
    # The order of the names counts: a recipe may depend on it.
    return hashlib.sha256(json.dumps(dataset_info).encode()).hexdigest()


def _differences(
    one: Mapping[str, Any], other: Mapping[str, Any], in_one: str, in_other: str, none: str = "none"
) -> dict[str, str]:
    """Return a line with both values for each name whose values differ: `NAME: 1 in the run, 2 now`."""
    return {
        name: f"{name}: {one.get(name, none)} {in_one}, {other.get(name, none)} {in_other}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    }


def _refuse(lines: Sequence[str], what: str, fix: str, where: str | None = None) -> None:
    if lines:
        raise ConfigError(what, given="\n".join(lines), where=where, fix=fix)


# Settings: of a run folder, of a checkpoint, and the present ones.


def check_same_run(folder: RunFolder, config: RunConfig, resume: str) -> None:
    """Check that a run folder is new, or holds the run to resume.

    Raises:
        CheckpointError: It holds a run, and --resume was not given.
        ConfigError: It holds a run with other settings.
    """
    if not folder.config.exists():
        return
    check_utf8(folder.path)
    if resume == "never" and folder.has_checkpoints:
        raise holds_a_run(folder.path)
    settings = settings_of(folder)
    name = Path(config.recipe).name
    if not folder.has_checkpoints:
        differing(settings, config)
        return
    if Path(str(settings.get("recipe"))).name != name:
        raise ConfigError(
            f"{folder.path} is a run of {settings.get('recipe')}, and not of {name}",
            fix="To resume it, name no recipe; for a new run, give another --run-dir:\n"
            f"  samebits train --run-dir {shlex.quote(str(folder.path))} --resume auto",
        )
    other = differing(settings, config)
    what = f"run folder {folder.path} holds a run with other settings"
    _refuse(other, what, _SAME + _longer(other, config, folder))


def check_came_from(folder: RunFolder, config: RunConfig) -> None:
    """Check that training can resume from a checkpoint of another run folder.

    The step and the optimizer state have another meaning under other settings.
    """
    if not folder.config.exists():
        return
    check_utf8(folder.path)
    other = differing(settings_of(folder), config)
    what = (
        f"the run in {folder.path} has other settings, so this run can't resume from its checkpoint"
    )
    _refuse(
        other, what, "Give the same settings, or start a new run." + _longer(other, config, folder)
    )


def check_settings(
    kept: Mapping[str, Any], config: RunConfig, path: Path, *, is_resume: bool
) -> None:
    """Compare settings with those in a checkpoint, at a resume from it or in the `config.yaml` of its run folder."""
    settings = kept.get(SETTINGS)
    if not isinstance(settings, Mapping):
        return
    other = differing(dict(settings), config)
    if is_resume:
        fix = "Give the same settings to resume from it, or another --run-dir for a new run."
        _refuse(other, f"checkpoint {path} was written with other settings", fix)
        return
    _refuse(
        [line for line in other if not line.startswith("recipe:")],  # the file may have moved
        f"{path.parent.parent / 'config.yaml'} was altered: the run was trained with other settings",
        "Restore the file; to use other settings, give them on the command line.",
        where=f"checkpoint {path}",
    )


def check_replay(run: Path, config: RunConfig, *, is_other_recipe: bool = False) -> None:
    """Check that the steps of a run can be repeated bit for bit with these settings."""
    settings = settings_of(RunFolder(run))
    if is_other_recipe:
        settings |= {"recipe": config.recipe}
    paths = _paths(config)
    _refuse(
        # of a path, what lies there is compared
        [line for line in differing(settings, config) if line.partition(":")[0] not in paths],
        "a replay can't change settings that determine the result",
        "Give only settings that are paths, such as data.root, and those that do not change the result.",
    )


def differing(settings: dict[str, Any], config: RunConfig) -> list[str]:
    """Return a line with both values for each setting that differs and changes the result."""
    # With the defaults of settings that were introduced after the run started.
    settings = without_removed(settings, names_of(type(config)))
    with suppress(ValidationError):  # a setting changed its meaning
        settings = plain_settings(type(config).model_validate(settings))
    now = flat(plain_settings(config))
    found = _differences(flat(settings), now, "in the run", "now", none="not set")
    return [found[name] for name in sorted(found) if not is_free(name, config)]


def is_free(name: str, config: RunConfig | None = None) -> bool:
    """Return whether a setting, by its dotted name, does not change the result; without `config`, of a usual run."""
    marks = marks_of(name)
    if Mark.VALIDATION in marks:
        return config is None or config.stop_early.patience is None
    return Mark.RESULT not in marks


def is_path(value: object) -> bool:
    """Return whether a setting is a path, or a list of them: its content determines the result, not its name."""
    return any(
        isinstance(each, Path) for each in (value if isinstance(value, list | tuple) else [value])
    )


def _paths(config: RunConfig) -> set[str]:
    return {name for name, value in flat(config.model_dump()).items() if is_path(value)}


def result_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the result, by dotted name, without paths; a recipe file by its name alone."""
    paths = _paths(config)
    settings = {
        name: value
        for name, value in flat(plain_settings(config)).items()
        if not is_free(name, config) and name not in paths
    }
    return settings | {"recipe": Path(config.recipe).name}


def plain_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings as plain values, with absolute paths: a run folder is read from other folders too."""

    def whole(value: Any, plain: Any) -> Any:
        if isinstance(value, Path):
            return str(value.expanduser().absolute())
        if isinstance(value, dict):
            return {name: whole(item, plain[name]) for name, item in value.items()}
        return plain

    settings: dict[str, Any] = whole(config.model_dump(), config.model_dump(mode="json"))
    return settings


def _longer(other: list[str], config: RunConfig, folder: RunFolder) -> str:
    """Return how to train longer, where the length of the run is what differs."""
    name = next(
        (name for name in ("epochs", "max_steps") for line in other if line.startswith(f"{name}:")),
        None,
    )
    if name is None:
        return ""
    # The schedule of the learning rate covers the whole run, so a run of another length is another run.
    return (
        f"\nThe learning rate follows from {name}, so a run keeps its {name}.\n"
        f"{ways_to_train_longer(folder, config, f'{name}={getattr(config, name)}')}"
    )


def ways_to_train_longer(folder: RunFolder, config: RunConfig, length: str | None = None) -> str:
    """Return the command of a longer run: from its final weights, if it has some, or from the start."""
    length = length or ("epochs=N" if config.max_steps is None else "max_steps=N")
    command = f"samebits train {shlex.quote(str(folder.config))} --run-dir NEW {length}"
    if not hasattr(getattr(config, "model", None), "weights") or not folder.weights.is_file():
        return f"To train longer, start a new run:\n  {command}"
    return (
        "To train further from its weights, start a new run:\n"
        f"  {command} model.weights={shlex.quote(str(folder.weights))}"
    )


def check_dataset_info(kept: Mapping[str, Any], dataset_info: Mapping[str, Any], run: Path) -> None:
    """Compare dataset info, as in `dataset_info.json` or as the recipe reads it, with the hash in a checkpoint."""
    before = kept.get(DATASET_INFO)
    now = _sha256(dataset_info)
    if before is None or before == now:
        return
    path = run / "dataset_info.json"
    what = f"{path} was altered since the run started"
    fix = "Restore the file."
    if not path.exists():
        what = f"{path} is missing, and the data has other dataset info than when the run started"
        fix = "Restore the file, or the data."
    raise CheckpointError(
        what, given=f"sha256 {now}", allowed=f"sha256 {before}, recorded in the checkpoint", fix=fix
    )


# The ranks of a world.


def check_ranks_agree(
    world: World,
    config: RunConfig,
    model: nn.Module,
    sizes: Mapping[str, int],
    fingerprint: Fingerprint,
) -> None:
    """Check that all ranks have the same code, settings, data and model."""
    import torch

    from samebits.cluster import collectives
    from samebits.provenance.fingerprint import HARDWARE, PROCESSOR, device_name

    settings = flat(config.model_dump(mode="json")).items()
    mine = {
        "samebits": __version__,
        **{
            f"setting {name}": value
            for name, value in settings
            if Mark.MACHINE not in marks_of(name)
        },
        **{f"{name} samples": size for name, size in sizes.items()},
        **{f"shape of {name}": str(tuple(each.shape)) for name, each in model.state_dict().items()},
        **fingerprint.code,
        **fingerprint.data,
        **fingerprint.trial,
    }
    if config.kernels != "portable":
        mine |= {"torch": torch.__version__, "device": device_name(world.device)}
    known = {PROCESSOR, *mine}
    kernels = {name: value for name, value in fingerprint.environment.items() if name not in known}
    mine = {**kernels, **mine}
    first = collectives.broadcast_object(world, mine)
    # Only rank 0 calls a recipe's `dataset_info`, which may load more modules.
    one_sided = {name for name in mine.keys() ^ first.keys() if name.startswith("code of ")}
    found = _differences(mine, first, f"on rank {world.rank}", "on rank 0")
    differences = [line for name, line in found.items() if name not in one_sided]
    # A rank receives rank 0's values only, and the differences of all ranks only where there are some.
    if not collectives.any_rank(world, bool(differences)):
        return
    for rank, lines in enumerate(collectives.all_gather_object(world, differences)):
        if lines:
            fix = "Start all ranks with the same command, code, packages and data."
            if any(line.split(":")[0] in HARDWARE for line in lines):
                fix = (
                    "Start all ranks on machines of one kind. For a new run on several kinds of processors,\n"
                    "set kernels=portable."
                )
            raise LaunchError(
                f"rank {rank} differs from rank 0 in {counted(len(lines), 'thing')}",
                given="\n".join(lines[:5]),
                fix=fix,
            )


# A resume: code, data, versions and processor must be those of the run so far (ADR 27).


def check_unchanged(before: Fingerprint, now: Fingerprint, config: RunConfig) -> list[str]:
    """Compare the fingerprint in a checkpoint with the current one; return warnings.

    An edited recipe or another processor is accepted if samples and trial micro-batch kept their bits: a
    changed log line is no reason to lose a run. Another version of a library is not accepted, because the trial does
    not run the optimizer.

    Raises:
        DataError: Only samples or files differ.
        CheckpointError: Something else differs that can change the result.
    """
    from samebits.provenance.fingerprint import PACKAGE, PROCESSOR

    if not any(before.to_json().values()):
        return [
            "the checkpoint is from a version of Samebits without fingerprints: whether code, data or library versions "
            "changed since is unknown"
        ]

    def changes(part: str, *, only_in_both: bool = False) -> dict[str, str]:
        old = getattr(before, part)
        new = getattr(now, part)
        found = _differences(old, new, "in the checkpoint", "now")
        return {n: line for n, line in found.items() if not only_in_both or (n in old and n in new)}

    environment = changes("environment")
    code = changes("code", only_in_both=True)
    data = changes("data")
    trial = changes("trial", only_in_both=True)
    if data and not (environment or code):
        error: SamebitsError = DataError(
            f"the data changed since this run started: {_first(data)}",
            given="\n".join(data.values()),
            cause="Files were added, edited, converted or replaced, or data.root is another dataset.",
            fix="Restore the data, or start a new run with another --run-dir;\n"
            "to continue with the changed data, set checkpoint.on_change=warn.",
        )
    else:
        changed = {**environment, **code, **data, **trial}
        is_proven = now.trial and before.trial.keys() == now.trial.keys() and not (data or trial)
        harmless = {PROCESSOR, *code} - {PACKAGE} if is_proven else set()
        serious = {name: line for name, line in changed.items() if name not in harmless}
        if not serious:
            return [
                f"changed since the checkpoint: {line}; a trial micro-batch had the same bits, so training continues"
                for line in changed.values()
            ]
        error = CheckpointError(
            f"{_first(serious)} changed since the checkpoint of this run",
            given="\n".join([*serious.values()][:12]),
            cause=None
            if environment or code
            else "The model starts from random numbers that do not follow from the seed, or reads the environment.",
            fix="Resume with the code, versions and kind of processor that the run started with. To continue to a "
            "model\nthat no other run can reproduce bit for bit, set checkpoint.on_change=warn.",
        )
    if config.checkpoint.on_change != "warn":
        raise error
    return [f"{error.what}\n  {error.slots['given'].replace(chr(10), chr(10) + '  ')}"]


def _first(changes: Mapping[str, str]) -> str:
    first, *others = changes
    return f"{first} and {len(others)} more" if others else first


# A stranger's run folder: what the statement of a complete run, `provenance.json`, states about the other files.


def check_stated(run: Path, weights: Path, which: str) -> None:
    """Check that the weights that a command has read are those of the run's statement.

    The hashes in `result.json` and in a manifest show damage. A publisher who replaces weights can replace those hashes
    too, but not the root, which covers the statement.

    Args:
        run: The run folder. Without a statement, as in a run that is not complete, nothing is checked.
        weights: The file or checkpoint folder that was read, whose content is that of `result.json` or its manifest.
    """
    files = RunFiles(run)
    if not files.has_statement:
        return
    record = files.record
    if weights.name == WEIGHTS:
        found = files.result.get("weights_sha256")
        stated = record.weights_sha256
        if found != stated:
            raise _not_stated(run, weights, f"sha256 {found}", f"sha256 {stated}")
        return
    parts = record.checkpoints.get(weights.name)
    if parts is None:
        raise _not_stated(
            run, weights / WEIGHTS, weights.name, ", ".join(record.checkpoints) or "no checkpoint"
        )
    manifest = manifest_of(weights)
    for name, stated in parts.items():
        if (found := str(manifest.get(name, {}).get("sha256"))) != stated:
            raise _not_stated(run, weights / name, f"sha256 {found}", f"sha256 {stated}")
    if which == "best" and (text := best_finding(files)):
        raise CheckpointError(
            f"the best checkpoint of {run} is not that of its record",
            given=text,
            fix=f"Restore {run / BEST_FILE}, or give a checkpoint by name: {', '.join(record.checkpoints)}.",
        )


def _not_stated(run: Path, file: Path, given: str, allowed: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not the file that {run / STATEMENT_FILE} states",
        given=given,
        allowed=allowed,
        cause="It was replaced or added after the run had ended.",
        fix=f"Restore the run folder; or open the file as it is: {file} --preset {run / 'config.yaml'}",
    )


def best_finding(files: RunFiles) -> str:
    """Compare `best.json`, which `--checkpoint best` takes, with the recorded evaluations; return what contradicts
    them.
    """
    if not os.path.lexists(files.path / BEST_FILE):
        return ""
    evaluations = files.record.evaluations
    try:
        return not_the_best(BEST_FILE, files.best, evaluations)
    except CheckpointError as error:
        return f"{BEST_FILE}: {error.slots.get('cause', error.what)}"


def not_the_best(file: str, best: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> str:
    """Return how the best validation that a file states contradicts the recorded evaluations; empty if it does not."""
    name = str(best.get("metric"))
    step = best.get("step")
    value = best.get("value")
    values = {each.step: each.metrics.get(name) for each in evaluations}
    known = [each for each in values.values() if each is not None]
    is_best = known and value == (max(known) if best.get("better") == "max" else min(known))
    if is_best and value in [each for at, each in values.items() if at == step]:
        return ""
    return f"{file}: {name} {value} after step {step} is not the best of the recorded evaluations"


def altered_settings(files: RunFiles, now: dict[str, Any] | None = None) -> list[str]:
    """Return a line such as "config.yaml: seed is 1, recorded 0" for each setting that is not the statement's.

    Args:
        now: The settings that determine the result, as the recipe resolves them, by dotted name; None: those in
            `config.yaml`, which has all of them, so that no recipe is imported.
    """
    recorded = files.record.settings
    if now is None:
        try:
            values = files.settings
        except ConfigError as error:
            return [f"config.yaml: {error.what}"]
        now = {name: values[name] for name in recorded if name in values}
        now["recipe"] = Path(str(values.get("recipe"))).name
    # Lists for tuples, as in the statement. It may be of a version with settings that were removed since.
    found = without_removed(json.loads(json.dumps(now, default=str)))
    recorded = without_removed(recorded)
    return [
        f"config.yaml: {name} is {found.get(name)}, recorded {recorded.get(name)}"
        for name in sorted(recorded.keys() | found.keys())
        if found.get(name) != recorded.get(name)
    ]


def altered_in(run: Path) -> list[str]:
    """Compare `config.yaml` with the statement, as `altered_settings` does; nothing if there is no statement."""
    files = RunFiles(run)
    try:
        return altered_settings(files) if files.has_statement else []
    except CheckpointError as error:
        return [error.line]
