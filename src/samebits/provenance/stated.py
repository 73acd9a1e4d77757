"""What the statement of a complete run, `provenance.json`, states about the other files in its folder."""

import os
from pathlib import Path

from samebits.errors import CheckpointError
from samebits.provenance.run_files import RunFiles
from samebits.provenance.statement import BEST_FILE, FILE_NAME
from samebits.storage.manifest import WEIGHTS, manifest_of


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
        found, stated = files.result.get("weights_sha256"), record.weights_sha256
        if found != stated:
            raise _not_stated(run, weights, f"sha256 {found}", f"sha256 {stated}")
        return
    parts = record.checkpoints.get(weights.name)
    if parts is None:
        raise _not_stated(run, weights / WEIGHTS, weights.name, ", ".join(record.checkpoints) or "no checkpoint")
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
        f"{file} is not the file that {run / FILE_NAME} states",
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
    try:
        best = files.best
    except CheckpointError as error:
        return f"{BEST_FILE}: {error.slots.get('cause', error.what)}"
    name, step, value = str(best.get("metric")), best.get("step"), best.get("value")
    values = {each.step: each.metrics.get(name) for each in files.record.evaluations}
    known = [each for each in values.values() if each is not None]
    is_best = known and value == (max(known) if best.get("better") == "max" else min(known))
    if is_best and value in [each for at, each in values.items() if at == step]:
        return ""
    return f"{BEST_FILE}: {name} {value} after step {step} is not the best of the recorded evaluations"
