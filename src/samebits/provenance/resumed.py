"""Check at a resume that code, data, versions and processor are those of the run so far (ADR 27)."""

from collections.abc import Mapping

from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, DataError, SamebitsError
from samebits.provenance.environment import PROCESSOR
from samebits.provenance.fingerprint import PACKAGE, Fingerprint


def check_unchanged(before: Fingerprint, now: Fingerprint, config: RunConfig) -> list[str]:
    """Compare the fingerprint in a checkpoint with the current one; return warnings.

    In exact mode, an edited recipe or another processor is accepted if samples and trial micro-batch kept their bits: a
    changed log line is no reason to lose a run. Another version of a library is not accepted, because the trial does
    not run the optimizer.

    Raises:
        DataError: Only samples or files differ.
        CheckpointError: Something else differs that can change the result.
    """
    if not any(before.to_json().values()):
        return [
            "the checkpoint is from a version of Samebits without fingerprints: whether code, data or library versions "
            "changed since is unknown"
        ]
    environment = _changes(before.environment, now.environment)
    code = _changes(before.code, now.code, only_in_both=True)
    data = _changes(before.data, now.data)
    trial = _changes(before.trial, now.trial, only_in_both=True)
    if data and not (environment or code):
        error: SamebitsError = DataError(
            f"the data changed since this run started: {_first(data)}",
            given="\n".join(data.values()),
            cause="Files were added, edited, converted or replaced, or data.root is another dataset.",
            fix="Restore the data, or start a new run with another --run-dir;\n"
            "to continue with the changed data, set checkpoint.on_change=warn.",
        )
        return _raise_or_warn(error, config.checkpoint.on_change != "warn")
    is_proven = bool(now.trial) and before.trial.keys() == now.trial.keys() and not (data or trial)
    harmless = {name for name in [*environment, *code] if is_proven and name != PACKAGE and name in {PROCESSOR, *code}}
    changes = {**environment, **code, **data, **trial}
    serious = {name: line for name, line in changes.items() if name not in harmless}
    if not serious:
        return [
            f"changed since the checkpoint: {line}; a trial micro-batch had the same bits, so training continues"
            for line in changes.values()
        ]
    error = CheckpointError(
        f"{_first(serious)} changed since the checkpoint of this run",
        given="\n".join([*serious.values()][:12]),
        cause=None
        if environment or code
        else "The model starts from random numbers that do not follow from the seed, or reads the environment.",
        fix="Resume with the code, versions and kind of processor that the run started with. To continue to a model\n"
        "that no other run can reproduce bit for bit, set checkpoint.on_change=warn.",
    )
    is_error = config.checkpoint.on_change == "error" or (
        config.checkpoint.on_change == "auto" and config.mode == "exact"
    )
    return _raise_or_warn(error, is_error)


def _changes(before: Mapping[str, str], now: Mapping[str, str], *, only_in_both: bool = False) -> dict[str, str]:
    """Return a line for each name whose value changed."""
    names = [name for name in dict.fromkeys([*before, *now]) if not only_in_both or (name in before and name in now)]
    return {
        name: f"{name}: {before.get(name, 'none')} in the checkpoint, {now.get(name, 'none')} now"
        for name in names
        if before.get(name) != now.get(name)
    }


def _first(changes: Mapping[str, str]) -> str:
    first, *others = changes
    return f"{first} and {len(others)} more" if others else first


def _raise_or_warn(error: SamebitsError, is_error: bool) -> list[str]:
    if is_error:
        raise error
    return [f"{error.what}\n  {error.slots['given'].replace(chr(10), chr(10) + '  ')}"]
